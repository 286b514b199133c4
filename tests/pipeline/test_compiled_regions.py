"""Compiled regions under the split backward: each use of a weight counts once; what cannot wait is left to torch."""

import copy
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters
from tests.pipeline.halves import Apply, assert_same, leaves, lin, numbers, plain, rand, split, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo uses what torch deprecates


class Region(NamedTuple):
    """A module to compile, an input for it, and how many pairs of a microbatch are to wait for W."""

    make: Callable[[], nn.Module]
    draw: Callable[[], Tensor]
    waiting: int


def rows() -> Tensor:
    return torch.randn(6, 8)


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def check(region: Region, backend: Any = "aot_eager", **options: Any) -> None:
    """Gradients of weights and inputs are plain torch's, bit for bit, and as many of them wait as are to."""
    theirs = region.make()
    ours = copy.deepcopy(theirs)
    a, b = leaves(region.draw)
    grads = [torch.ones_like(theirs(x)) for x in a]
    wanted = plain(theirs, a, grads)
    ours.compile(backend=backend, **options)
    found, waiting = split(ours, b, grads)
    assert waiting == region.waiting
    assert_same(theirs, ours)
    for mine, its in zip(found, wanted, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or torch.equal(mine, its)


# One weight, one input and one output gradient: calls that are alike, of which compilers would make one.
ALIKE = {
    "linear": Region(lambda: Apply(lambda m, x: m.a(x) + m.a(x), a=lin()), tokens, 2),
    "matmul": Region(lambda: Apply(lambda m, x: x @ m.w + x @ m.w + x @ m.w, w=rand(8, 5)), tokens, 3),
    "embedding": Region(lambda: Apply(lambda m, x: m.e(x) + m.e(x), e=nn.Embedding(7, 8)), numbers, 2),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ALIKE)
def test_uses_that_are_alike_count_each(name: str, backend: str) -> None:
    check(ALIKE[name], backend, fullgraph=True)


# A transform of torch.func differentiates the weight, or runs it for many inputs at once.
TRANSFORMED = {
    "grad": Region(lambda: Apply(gradient_of_a_product, a=lin(), b=lin()), tokens, 1),
    "vmap": Region(
        lambda: Apply(lambda m, x: torch.vmap(lambda r: F.linear(r, m.a.weight))(m.b(x)), a=lin(), b=lin()), tokens, 1
    ),
}


def gradient_of_a_product(m: Any, x: Tensor) -> Tensor:
    return m.b(x) + torch.func.grad(lambda r: F.linear(r, m.a.weight).square().sum())(x)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_are_left_to_torch(name: str) -> None:
    check(TRANSFORMED[name], fullgraph=True)


def complex_product(m: Any, x: Tensor) -> Tensor:
    y = F.linear(m.a(x).to(torch.complex64) * (1 + 2j), m.w)
    return y.real + 2 * y.imag


def with_room(m: Any, x: Tensor) -> Tensor:
    """A product of constants that is written to memory of its own."""
    made = torch.empty(8, 8)
    torch.matmul(torch.ones(8, 8), torch.ones(8, 8), out=made)
    return m.a(x) @ made


# What has another gradient than the formulas say, and other ways to make a call that they know.
CALLS = {
    "complex": Region(lambda: Apply(complex_product, a=lin(), w=torch.randn(5, 8, dtype=torch.complex64)), rows, 1),
    "a weight that is a vector": Region(lambda: Apply(lambda m, x: F.linear(m.a(x), m.w), a=lin(), w=rand(8)), rows, 1),
    "a bias with a row": Region(
        lambda: Apply(lambda m, x: F.linear(m.a(x), m.w, m.b), a=lin(), w=rand(5, 8), b=rand(1, 5)), rows, 1
    ),
    "a bias for each row": Region(
        lambda: Apply(lambda m, x: F.linear(m.a(x), m.w, m.b), a=lin(), w=rand(5, 8), b=rand(6, 5)), rows, 1
    ),
    "mm by keyword": Region(lambda: Apply(lambda m, x: torch.mm(x, mat2=m.w), w=rand(8, 5)), rows, 1),
    "bmm by keyword": Region(lambda: Apply(lambda m, x: x.bmm(mat2=m.w), w=rand(4, 8, 5)), tokens, 1),
    "addmm as a method": Region(lambda: Apply(lambda m, x: m.b.addmm(x, m.w), w=rand(8, 5), b=rand(5)), rows, 1),
    "into given memory": Region(lambda: Apply(with_room, a=lin()), rows, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_wait_where_the_formulas_hold(name: str) -> None:
    check(CALLS[name], fullgraph=True)


def within_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: m.b(F.gelu(m.a(x))), x, use_reentrant=False)


def test_a_checkpoint_inside_is_left_to_torch() -> None:
    check(Region(lambda: Apply(within_a_checkpoint, a=lin(), b=lin()), tokens, 0), fullgraph=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_checkpoint_around_a_region_waits(backend: str, reentrant: bool) -> None:
    """All that waits without it, computed as the same compiler computes it."""

    def around(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.inner, x, use_reentrant=reentrant)

    linears = {name: lin(bias=False) for name in "ab"}  # a graph adds up a bias in an order of its own
    theirs = Apply(around, inner=Apply(lambda m, x: m.b(F.gelu(m.a(x))), **linears))
    ours = copy.deepcopy(theirs)
    for model in (theirs, ours):
        model.inner.compile(backend=backend, fullgraph=True)
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    wanted = plain(theirs, a, grads)
    found, waiting = split(ours, b, grads)
    assert waiting == 2
    assert_same(theirs, ours)
    assert all(torch.equal(mine, its) for mine, its in zip(found, wanted, strict=True))


def test_uses_of_one_input_share_a_copy() -> None:
    """Between I and W: the input once, and the gradients of three outputs."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = x.tanh()
        return m.q(h).tanh() + m.k(h).tanh() * m.v(h).tanh()

    ours = Apply(run, q=lin(), k=lin(), v=lin())
    ours.compile(backend="aot_eager", fullgraph=True)
    x = tokens().requires_grad_()
    half = SplitBackward(StageParameters(ours))
    with half.recording():
        out = ours(x)
    half.run_inputs([out], [tokens()])
    assert half.waiting == 3
    assert half.waiting_bytes == (1 + 3) * x.nbytes


def broken_loop(m: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = m.a(x).tanh()
        torch._dynamo.graph_break()
        x = m.b(x)
    return x


def broken_once(m: Any, x: Tensor) -> Tensor:
    x = m.a(x).tanh()
    torch._dynamo.graph_break()
    return m.b(x) + m.a(x)


BROKEN = {
    "into two graphs": Region(lambda: Apply(broken_once, a=lin(), b=lin()), tokens, 3),
    "in a loop, whose frame is skipped": Region(lambda: Apply(broken_loop, a=lin(), b=lin()), tokens, 4),
}


@pytest.mark.parametrize("name", BROKEN)
def test_graphs_that_break(name: str) -> None:
    """What Dynamo does not compile runs under the mode, and waits as eager code does."""
    check(BROKEN[name])


def test_ranks_that_are_threads() -> None:
    """One I begins inside another, in another thread: each has the pairs of its own graph."""
    model = Apply(lambda m, x: m.a(x).tanh(), a=lin())
    model.compile(backend="aot_eager", fullgraph=True)
    split(model, [tokens()], [tokens()])  # compiles
    parameters = StageParameters(model)
    halves = [SplitBackward(parameters) for _ in range(2)]
    outputs = []
    for half in halves:
        with half.recording():
            outputs.append(model(tokens().requires_grad_()))
    first_in, both_in, first_done = Event(), Event(), Event()
    waiting: list[list[int]] = []

    def in_first(grad: Tensor) -> None:
        first_in.set()
        assert both_in.wait(30)

    def in_second(grad: Tensor) -> None:
        both_in.set()
        assert first_done.wait(30)
        waiting.append([half.waiting for half in halves])

    def first() -> None:
        halves[0].run_inputs([outputs[0]], [tokens()])
        first_done.set()

    outputs[0].register_hook(in_first)
    outputs[1].register_hook(in_second)
    thread = Thread(target=first)
    thread.start()
    assert first_in.wait(30)
    halves[1].run_inputs([outputs[1]], [tokens()])
    thread.join()
    assert [*waiting, [half.waiting for half in halves]] == [[1, 0], [1, 1]]
