"""Split backward against plain torch: the same bits in every gradient, whatever the stage is made of."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.stage_blocks import BATCH, TOKENS, WIDTH, Block, stage
from retrograde.errors import PipelineError
from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters
from tests.pipeline.halves import (
    MICROBATCHES,
    Apply,
    assert_same,
    frozen,
    image,
    leaves,
    lin,
    numbers,
    plain,
    rand,
    split,
    tokens,
)


class Doubled(torch.autograd.Function):
    """A user's Function that counts how often it runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Doubled.runs += 1
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class Again(torch.autograd.Function):
    """Runs its part of the model once more in backward, and asks for gradients both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        return part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (twice,) = torch.autograd.grad(ctx.part(x), ctx.part.weight, grad)
            assert twice.abs().sum() > 0
            ctx.part(x).backward(grad)
        return x.grad, None


def tied() -> nn.Module:
    model = Apply(lambda m, x: F.linear(m.mid(m.emb(x)), m.emb.weight), emb=nn.Embedding(7, 8), mid=lin())
    return model


def penalty(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    (g,) = torch.autograd.grad(y.tanh().sum(), m.a.weight, create_graph=True)
    return m.b(y) + g.square().sum()


def inner_backward(m: Any, x: Tensor) -> Tensor:
    m.a(x.detach()).square().sum().backward()
    return m.b(m.a(x))


def added_in_checkpoints(m: Any, x: Tensor) -> Tensor:
    """Reentrant ones, each of which adds to the parameter's gradient by itself; the last use is outside."""

    def add(part: nn.Module, x: Tensor) -> Tensor:
        return part(x) + m.pos[None]

    y = add(m.b, checkpoint(add, m.a, x, use_reentrant=True))
    return checkpoint(add, m.c, y, use_reentrant=True).tanh()


def last_hidden(m: Any, x: Tensor) -> Tensor:
    return m.lstm(x)[0]


def self_attention(m: Any, x: Tensor) -> Tensor:
    return m.att(x, x, x, need_weights=False)[0]


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.b(m.a(x).relu()).float()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    # name: (model, input, how many pairs wait for W; -1 is "not counted")
    "mlp": (lambda: nn.Sequential(lin(), nn.ReLU(), lin(8, 5)), tokens, 2),
    "no bias": (lambda: nn.Sequential(lin(8, 8, False), nn.Tanh(), lin(8, 3, False)), tokens, 2),
    "rows": (lambda: nn.Sequential(lin(), nn.ReLU(), lin()), lambda: rand(5, 8), 2),
    "vector input is torch's": (lambda: lin(), lambda: rand(8), 0),
    "transposed input": (lambda: Apply(lambda m, x: m.a(x.transpose(0, 1)), a=lin()), tokens, 1),
    "column-major input": (lambda: Apply(lambda m, x: m.a(x.t()), a=lin(6, 3)), lambda: rand(6, 9), 1),
    "column-major weight": (lambda: Apply(lambda m, x: F.linear(x, m.w), w=rand(8, 5).t()), tokens, 1),
    "bias of one number is torch's": (
        lambda: Apply(lambda m, x: F.linear(x, m.w, m.b), w=rand(5, 8), b=rand(1)),
        tokens,
        0,
    ),
    "in place on the output": (lambda: Apply(lambda m, x: m.b(m.a(x).add_(1).relu_()), a=lin(), b=lin()), tokens, 2),
    "output returned as a view": (lambda: Apply(lambda m, x: m.a(x).transpose(1, 2)[:, 1:], a=lin()), tokens, 1),
    "matmul": (lambda: Apply(lambda m, x: torch.matmul(x @ m.w, m.v), w=rand(8, 5), v=rand(5, 4)), tokens, 2),
    "matmul with a transposed view": (lambda: Apply(lambda m, x: x @ m.w.T @ m.w, w=rand(5, 8)), tokens, 2),
    "left factor": (lambda: Apply(lambda m, x: m.w @ x, w=rand(3, 5)), lambda: rand(5, 8), 1),
    "left factor, column-major": (lambda: Apply(lambda m, x: m.w @ x.t(), w=rand(8, 3).t()), lambda: rand(5, 8), 1),
    "left factor of a batch is torch's": (lambda: Apply(lambda m, x: m.w @ x, w=rand(3, 6)), tokens, 0),
    "bmm": (lambda: Apply(lambda m, x: torch.bmm(x, m.w), w=rand(4, 8, 5)), tokens, 1),
    "bmm left": (lambda: Apply(lambda m, x: m.w.bmm(x), w=rand(4, 3, 6)), tokens, 1),
    "mm by keyword": (lambda: Apply(lambda m, x: torch.mm(x, mat2=m.w), w=rand(8, 5)), lambda: rand(5, 8), 1),
    "addmm": (lambda: Apply(lambda m, x: torch.addmm(m.b, x, m.w), w=rand(8, 5), b=rand(5)), lambda: rand(5, 8), 1),
    "addmm, the method": (
        lambda: Apply(lambda m, x: m.b.addmm(x, m.w), w=rand(8, 5), b=rand(5)),
        lambda: rand(5, 8),
        1,
    ),
    "addmm scaled is torch's": (
        lambda: Apply(lambda m, x: torch.addmm(m.b, x, m.w, alpha=2.0), w=rand(8, 5), b=rand(5)),
        lambda: rand(5, 8),
        0,
    ),
    "einsum is torch's": (lambda: Apply(lambda m, x: torch.einsum("bti,io->bto", x, m.w), w=rand(8, 5)), tokens, 0),
    "two parameters": (lambda: Apply(lambda m, x: x @ (m.a @ m.b), a=rand(8, 2), b=rand(2, 8)), tokens, 0),
    "a view of a parameter added, the gradient of both": (
        lambda: Apply(lambda m, x: (m.a(x) + m.pos[None]).tanh(), a=lin(), pos=rand(5, 8)),
        lambda: rand(1, 5, 8),
        1,
    ),
    "a flat parameter added": (
        lambda: Apply(lambda m, x: (m.a(x) + m.pos.view(5, 8)).tanh(), a=lin(), pos=rand(40)),
        lambda: rand(5, 8),
        1,
    ),
    "a view of a parameter added in checkpoints": (
        lambda: Apply(added_in_checkpoints, a=lin(), b=lin(), c=lin(), pos=rand(5, 8)),
        lambda: rand(1, 5, 8),
        3,
    ),
    "low rank": (
        lambda: Apply(lambda m, x: m.l(x) + x @ m.a @ m.b, l=frozen(lin(), ""), a=rand(8, 2), b=rand(2, 8)),
        tokens,
        2,
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2, bias=False)),
        image,
        2,
    ),
    "convolution in groups": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), image, 1),
    "channels last": (
        lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
        lambda: image().contiguous(memory_format=torch.channels_last),
        1,
    ),
    "conv1d": (lambda: nn.Conv1d(6, 5, 3, dilation=2), tokens, 1),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: rand(2, 2, 4, 4, 4), 1),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 5, 3, stride=2, output_padding=1), image, 1),
    "padding by name": (lambda: nn.Conv2d(4, 6, 3, padding="same"), image, 1),
    "one image": (lambda: nn.Conv2d(4, 6, 3), lambda: rand(4, 6, 6), 1),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), image, 1),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 8), lin()), numbers, 2),
    "embedding with padding": (lambda: nn.Embedding(7, 8, padding_idx=-1), numbers, 1),
    "embedding by frequency": (lambda: nn.Embedding(7, 8, scale_grad_by_freq=True), numbers, 1),
    "embedding renormalised is torch's": (lambda: nn.Embedding(7, 8, max_norm=1.0), numbers, 0),
    "tied": (tied, numbers, 3),
    "called three times": (lambda: Apply(lambda m, x: m.a(m.a(m.a(x).relu()).tanh()), a=lin()), tokens, 3),
    "used by others too": (lambda: Apply(lambda m, x: m.a(m.a(x)) + m.a.weight.square().sum(), a=lin()), tokens, 0),
    "asked for its shape": (lambda: Apply(lambda m, x: m.a(x) * m.a.weight.shape[0], a=lin()), tokens, 1),
    "frozen weight": (lambda: frozen(nn.Sequential(lin(), nn.ReLU(), lin()), "0.weight"), tokens, 1),
    "frozen bias": (lambda: frozen(nn.Sequential(lin(), nn.ReLU(), lin()), "2.bias"), tokens, 2),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(8), lin(), nn.GroupNorm(2, 6), nn.PReLU()), tokens, 1),
    "lstm": (lambda: Apply(last_hidden, lstm=nn.LSTM(8, 5, batch_first=True)), tokens, 0),
    "attention module": (lambda: Apply(self_attention, att=nn.MultiheadAttention(8, 2, batch_first=True)), tokens, 2),
    "own function": (lambda: Apply(lambda m, x: m.a(Doubled.apply(x, m.w)), a=lin(), w=rand(8)), tokens, 1),
    "runs again in backward": (lambda: Apply(lambda m, x: m.b(Again.apply(m.b(x), m.a)), a=lin(), b=lin()), tokens, 3),
    "gradient penalty": (lambda: Apply(penalty, a=lin(), b=lin()), tokens, -1),
    "backward inside forward": (lambda: Apply(inner_backward, a=lin(), b=lin()), tokens, -1),
    "autocast": (lambda: Apply(autocast, a=lin(), b=lin()), tokens, 2),
    "bfloat16": (lambda: nn.Sequential(lin(), nn.ReLU(), lin()).bfloat16(), lambda: tokens().bfloat16(), 2),
    "float64": (lambda: nn.Sequential(lin(), nn.ReLU(), lin()).double(), lambda: tokens().double(), 2),
    "part under no_grad": (lambda: Apply(lambda m, x: m.b(x + torch.no_grad()(m.a)(x)), a=lin(), b=lin()), tokens, 1),
    "reentrant around the other kind": (
        lambda: Apply(lambda m, x: checkpoint(m.s, x, use_reentrant=True), s=stage("sdpa", "other")),
        lambda: rand(BATCH, TOKENS, WIDTH),
        8,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_torch(name: str) -> None:
    make, make_input, expected = CASES[name]
    torch.manual_seed(0)
    theirs = make()
    ours = copy.deepcopy(theirs)
    a, b = leaves(make_input)
    grads = [torch.randn_like(copy.deepcopy(theirs)(x)) for x in a]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        wanted = plain(theirs, a, grads)
        found, waiting = split(ours, b, grads)
    assert_same(theirs, ours)
    for x, y in zip(wanted, found, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))
    assert expected in (-1, waiting)


def test_the_weight_is_not_needed_in_w() -> None:
    """At stage 3 its values are on other ranks by then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), lin(96, 5))
    theirs = copy.deepcopy(model)
    x, grad = image(), rand(3, 5)
    theirs(x).backward(grad)
    run = SplitBackward()
    with run.recording():
        out = model(x)
    run.run_inputs([out], [grad])
    with torch.no_grad():
        for p in model.parameters():
            p.data.fill_(float("nan"))
    run.run_weights()
    assert_same(theirs, model)


def test_functions_of_the_user_run_once() -> None:
    make, make_input, _ = CASES["own function"]
    Doubled.runs = 0
    model = make()
    run = SplitBackward()
    with run.recording():
        out = model(make_input())
    run.run_inputs([out], [torch.ones_like(out)])
    run.run_weights()
    assert Doubled.runs == 1


def test_a_function_of_the_user_and_a_product_share_a_weight() -> None:
    """A custom Function is not seen by the mode, so its part is added in I and the product's in W.

    That is (.grad + a) + b where torch has .grad + (a + b): the last bit may differ from the second microbatch on.
    """
    theirs = Apply(lambda m, x: x @ m.w + Doubled.apply(x, m.w[0]), w=rand(8, 8))
    ours = copy.deepcopy(theirs)
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    plain(theirs, a, grads)
    split(ours, b, grads)
    torch.testing.assert_close(ours.w.grad, theirs.w.grad)


@pytest.mark.parametrize("recompute", ["reentrant", "other"])
@pytest.mark.parametrize("kind", ["plain", "sdpa"])
def test_checkpointed_blocks_run_exactly_twice(kind: str, recompute: str) -> None:
    theirs, ours = stage(kind, recompute), stage(kind, recompute)
    a, b = leaves(lambda: rand(BATCH, TOKENS, WIDTH))
    grads = [rand(BATCH, TOKENS, WIDTH) for _ in a]
    wanted = plain(theirs, a, grads)
    found, _ = split(ours, b, grads)
    assert_same(theirs, ours)
    assert all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True))
    assert [block.runs for block in ours] == [2 * MICROBATCHES] * 2


@pytest.mark.parametrize("kinds", ["before", "after", "before after"])
def test_hooks_see_the_whole_gradient_once(kinds: str) -> None:
    seen: dict[str, list[Tensor]] = {"plain": [], "split": []}
    models = {}
    for way in seen:
        torch.manual_seed(0)
        model = models[way] = Apply(lambda m, x: m.a(m.a(x).relu()), a=lin())
        if "before" in kinds:
            model.a.weight.register_hook(lambda g, way=way: seen[way].append(g.clone()) or g * 2)
        if "after" in kinds:
            model.a.weight.register_post_accumulate_grad_hook(lambda p, way=way: seen[way].append(p.grad.clone()))
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    plain(models["plain"], a, grads)
    split(models["split"], b, grads)
    assert len(seen["plain"]) == len(kinds.split()) * MICROBATCHES
    assert len(seen["split"]) == len(seen["plain"])
    assert all(torch.equal(x, y) for x, y in zip(seen["plain"], seen["split"], strict=True))


def test_an_unsplit_backward_of_a_recorded_forward_defers_nothing() -> None:
    theirs, ours = stage(), stage()
    x, grad = rand(BATCH, TOKENS, WIDTH), rand(BATCH, TOKENS, WIDTH)
    theirs(x).backward(grad)
    run = SplitBackward()
    with run.recording():
        out = ours(x)
    out.backward(grad)
    assert run.waiting_bytes == 0
    assert_same(theirs, ours)


def test_an_input_changed_between_i_and_w_is_refused() -> None:
    model, x = lin(), rand(4, 8)
    run = SplitBackward()
    with run.recording():
        out = model(x)
    run.run_inputs([out], [torch.ones_like(out)])
    x.add_(1)
    with pytest.raises(PipelineError, match=r"input of a linear \(\[4, 8\]\) was changed in place between I and W"):
        run.run_weights()


def test_a_failed_input_pass_holds_nothing() -> None:
    model = Apply(lambda m, x: m.a(Doubled.apply(m.a(x), m.w)), a=lin(), w=rand(8))
    run = SplitBackward()
    with run.recording():
        out = model(tokens())
    model.w.register_hook(lambda g: (_ for _ in ()).throw(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        run.run_inputs([out], [torch.ones_like(out)])
    assert run.waiting_bytes == 0


def test_a_small_view_does_not_keep_a_large_tensor() -> None:
    theirs = Apply(lambda m, x: m.b(m.a(x)[:, :1]), a=lin(), b=lin())
    ours = copy.deepcopy(theirs)
    x, grad = tokens(), rand(4, 1, 8)
    theirs(x).backward(grad)
    run = SplitBackward()
    with run.recording():
        out = ours(x)
    run.run_inputs([out], [grad])
    # a: its input and the gradient of its output; b: a slice of a's output, and the gradient of its own
    assert run.waiting_bytes == 4 * (2 * 4 * 6 * 8 + 2 * 4 * 8)
    run.run_weights()
    assert_same(theirs, ours)


@pytest.mark.filterwarnings("ignore")  # Dynamo uses what torch deprecates
@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole: bool) -> None:
    torch._dynamo.reset()
    theirs = nn.Sequential(lin(), nn.GELU(), lin())
    ours = copy.deepcopy(theirs)
    compiled = (
        torch.compile(ours, backend="aot_eager")
        if whole
        else nn.Sequential(torch.compile(ours[0], backend="aot_eager"), ours[1], ours[2])
    )
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    wanted = plain(theirs, a, grads)
    found, waiting = split(compiled, b, grads)
    assert waiting == 2
    assert_same(theirs, ours)
    assert all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_place_on_the_output(backend: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.a(x), inplace=True)
        z = m.b(y)
        z += y
        return m.c(z)

    torch._dynamo.reset()
    theirs = Apply(run, a=lin(), b=lin(), c=lin())
    ours = copy.deepcopy(theirs)
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    wanted = plain(theirs, a, grads)
    found, waiting = split(torch.compile(ours, backend=backend), b, grads)
    assert waiting == 3
    rounding = 2e-6 if backend == "inductor" else 0  # inductor fuses operations, which rounds otherwise
    pairs = [*zip(found, wanted, strict=True)]
    pairs += [(mine.grad, its.grad) for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True)]
    for mine, its in pairs:
        torch.testing.assert_close(mine, its, rtol=rounding, atol=rounding)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_after_it_was_saved_and_loaded() -> None:
    """A pickled parameter has the number by which graphs know the one that was saved."""
    torch._dynamo.reset()
    saved = nn.Sequential(lin(), nn.GELU(), lin())
    StageParameters(saved)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    ours = torch.load(file, weights_only=False)
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    split(torch.compile(ours, backend="aot_eager"), b, grads)
    assert all(p.grad is None for p in saved.parameters())
    plain(saved, a, grads)
    assert_same(saved, ours)
    torch._dynamo.reset()


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_a_view_of_a_weight(late: bool) -> None:
    """One sees the gradient of its view; what waits in another use is added apart from it."""
    seen: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        view = m.w[:5]
        if not late:
            view.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        view.retain_grad()
        y = F.linear(x, view)
        if late:
            view.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        return F.linear(y, m.w[5:, :5]).tanh()

    theirs = Apply(run, w=rand(8, 8))
    ours = copy.deepcopy(theirs)
    a, b = leaves(tokens)
    grads = [tokens()[..., :3] for _ in a]
    plain(theirs, a, grads)
    wanted = list(seen)
    seen.clear()
    assert split(ours, b, grads)[1] == 1
    assert len(wanted) == MICROBATCHES == len(seen) and all(map(torch.equal, wanted, seen))
    torch.testing.assert_close(theirs.w.grad, ours.w.grad, rtol=0, atol=0)


def test_blocks_count_their_runs() -> None:
    """The counter that the checkpoint test reads does count."""
    block = Block()
    block(rand(BATCH, TOKENS, WIDTH))
    assert block.runs == 1
