"""What waits for W in models as people write them: under autocast, in attention modules, with many small matrices.

As in test_split.py, gradients are those of plain torch, bit for bit; autocast's too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.pipeline.split import SplitBackward
from tests.pipeline.halves import (
    Apply,
    assert_same,
    attention,
    deferred,
    experts,
    frozen,
    fused,
    image,
    leaves,
    lin,
    numbers,
    plain,
    rand,
    split,
    tokens,
)


def lowered(fn: Callable[[Any, Tensor], Tensor], **options: Any) -> Callable[[Any, Tensor], Tensor]:
    """`fn` under autocast, with a result in full precision."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            return fn(m, x).float()

    return run


def two_regions(m: Any, x: Tensor) -> Tensor:
    """Each region casts the weight anew, so that gradients are added in full precision."""
    once = lowered(lambda m, x: m.a(x))
    return once(m, once(m, x).relu())


def part_in_full(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.a(x)
        with torch.autocast("cpu", enabled=False):
            z = m.a(y.float())
        return m.a(z).float()


def recomputed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    return lowered(lambda m, x: checkpoint(lambda y: m.b(m.a(m.a(y)).relu()), x, use_reentrant=reentrant))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


# ---- functions of the user
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * F.linear(x, weight)


deferred_scaled = rg.defer(
    scaled,
    input_grad=lambda grad, x, weight: (2 * grad) @ weight,
    weight_grad=lambda grad, x: (2 * grad).flatten(0, 1).t() @ x.flatten(0, 1),
)
deferred_linear = rg.defer(lambda x, weight, bias=None: F.linear(x, weight, bias))


@rg.defer
def in_full(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As a kernel that autocast knows nothing of."""
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), weight, bias)


class FusedLower(torch.autograd.Function):
    """As torch.amp.custom_fwd has it: it casts what it is given."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


fused_lower = rg.defer(lambda x, weight: FusedLower.apply(x, weight))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "autocast, used twice": (lambda: Apply(lowered(lambda m, x: m.a(m.a(x).relu())), a=lin()), tokens, 2),
    "autocast without cache": (
        lambda: Apply(lowered(lambda m, x: m.a(m.a(x).relu()), cache_enabled=False), a=lin()),
        tokens,
        2,
    ),
    "autocast, two regions": (lambda: Apply(two_regions, a=lin()), tokens, 2),
    "autocast, a part in full precision": (lambda: Apply(part_in_full, a=lin()), tokens, 3),
    "autocast, three of one input": (
        lambda: Apply(lowered(lambda m, x: m.a(x) * m.b(x) + m.c(x)), a=lin(), b=lin(), c=lin()),
        tokens,
        3,
    ),
    "autocast, frozen bias": (lambda: frozen(Apply(lowered(lambda m, x: m.a(x)), a=lin()), "bias"), tokens, 1),
    "autocast, convolution": (lambda: Apply(lowered(lambda m, x: m.c(x)), c=nn.Conv2d(4, 6, 3)), image, 1),
    "autocast, embedding": (
        lambda: Apply(lowered(lambda m, x: F.linear(m.a(m.e(x)), m.e.weight)), e=nn.Embedding(7, 8), a=lin()),
        numbers,
        3,
    ),
    "autocast, a view": (lambda: Apply(lowered(lambda m, x: x @ m.w.t() + x @ m.w.t()), w=rand(8, 8)), tokens, 2),
    "autocast, bmm": (lambda: Apply(lowered(lambda m, x: torch.bmm(x, m.w)), w=rand(4, 8, 5)), tokens, 1),
    "autocast, checkpoint": (lambda: Apply(recomputed(False), a=lin(), b=lin()), tokens, 3),
    "autocast, reentrant checkpoint": (lambda: Apply(recomputed(True), a=lin(), b=lin()), tokens, 3),
    "autocast, attention": (lambda: Apply(lowered(lambda m, x: m.att(x)), att=attention()), tokens, 2),
    "autocast, a linear layer of the user": (
        lambda: Apply(
            lowered(lambda m, x: deferred_linear(deferred_linear(x, *m.a.parameters()).relu(), *m.a.parameters())),
            a=lin(),
        ),
        tokens,
        2,
    ),
    "autocast, formulas of the user": (
        lambda: Apply(lowered(lambda m, x: deferred_scaled(m.a(x).relu(), m.w)), a=lin(), w=rand(8, 8)),
        tokens,
        2,
    ),
    "autocast, a fused layer that casts": (
        lambda: Apply(lowered(lambda m, x: m.b(fused_lower(x, m.a.weight))), a=lin(bias=False), b=lin()),
        tokens,
        2,
    ),
    "autocast, a layer of the user in full precision": (
        lambda: Apply(
            lowered(lambda m, x: in_full(in_full(x, *m.a.parameters()) + m.b(x), *m.a.parameters())), a=lin(), b=lin()
        ),
        tokens,
        3,
    ),
    "autocast, a layer of the user in full precision after another": (
        lambda: Apply(lowered(lambda m, x: in_full(m.b(x), *m.a.parameters())), a=lin(), b=lin()),
        tokens,
        2,
    ),
    "autocast, checkpoint of a layer of the user": (
        lambda: Apply(
            lowered(
                lambda m, x: checkpoint(lambda y: m.b(deferred_linear(y, *m.a.parameters())), x, use_reentrant=False)
            ),
            a=lin(),
            b=lin(),
        ),
        tokens,
        2,
    ),
    "autocast, double precision is torch's": (
        lambda: Apply(lowered(lambda m, x: m.a(x)), a=lin()).double(),
        lambda: tokens().double(),
        1,
    ),
    "attention, cross": (lambda: attention("cross"), tokens, 3),
    "attention, weights": (lambda: attention("weights"), tokens, 2),
    "attention, no bias": (lambda: attention(bias=False), tokens, 2),
    "attention, more keys": (lambda: attention(add_bias_kv=True), tokens, 2),
    "encoder layer": (encoder, tokens, 4),
    "experts": (lambda: Apply(experts, w=rand(3, 8, 4)), tokens, 1),
    "a matrix for each head": (
        lambda: Apply(lambda m, x: x.unflatten(-1, (2, 4)).mT.mT.transpose(1, 2) @ m.w, w=rand(2, 4, 3)),
        tokens,
        1,
    ),
    "a matrix for each head, left": (
        lambda: Apply(lambda m, x: m.w @ x.unflatten(-1, (2, 4)).transpose(1, 2), w=rand(2, 3, 6)),
        tokens,
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_torch(name: str) -> None:
    make, make_input, expected = CASES[name]
    torch.manual_seed(0)
    theirs = make()
    ours = copy.deepcopy(theirs)
    a, b = leaves(make_input)
    # Not leaves, as what comes into a stage is none: autocast shares the casts of leaves.
    a, b = ([x + 0 if x.is_floating_point() else x for x in xs] for xs in (a, b))
    for x in (*a, *b):
        if x.requires_grad:
            x.retain_grad()
    grads = [torch.randn_like(copy.deepcopy(theirs)(x)) for x in a]
    wanted = plain(theirs, a, grads)
    found, waiting = split(ours, b, grads)
    assert_same(theirs, ours)
    for x, y in zip(wanted, found, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))
    assert waiting == expected


def test_autocast_with_a_hook() -> None:
    """A weight that does not wait is added up in the lower precision as well."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Apply(lowered(lambda m, x: m.b(m.a(m.a(x)))), a=lin(), b=lin()))
        models[-1].a.weight.register_hook(lambda grad: grad * 2)
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    plain(models[0], a, grads)
    assert split(models[1], b, grads)[1] == 1
    assert_same(*models)


def test_autocast_keeps_no_cast_of_a_weight() -> None:
    """Between I and W there is the input and the gradient, both in the lower precision; of three uses one input."""
    model = Apply(lowered(lambda m, x: m.a(x) * m.b(x) + m.c(x)), a=lin(), b=lin(), c=lin())
    x = tokens().requires_grad_()
    run = SplitBackward()
    with run.recording():
        out = model(x)
    run.run_inputs([out], [torch.ones_like(out)])
    assert run.waiting_bytes == 2 * (1 + 3) * x.numel()
    run.run_weights()


@pytest.mark.parametrize(("plain_one", "deferred_one"), [(fused, deferred), (scaled, deferred_scaled)])
def test_a_function_of_the_user(plain_one: Any, deferred_one: Any) -> None:
    bias = plain_one is fused

    def model(function: Any) -> nn.Module:
        def run(m: Any, x: Tensor) -> Tensor:
            return function(m.a(x).relu(), m.b.weight, *([m.b.bias] if bias else []))

        torch.manual_seed(0)
        return Apply(run, a=lin(), b=lin())

    theirs, ours = model(plain_one), model(deferred_one)
    a, b = leaves(tokens)
    grads = [tokens() for _ in a]
    wanted = plain(theirs, a, grads)
    found, waiting = split(ours, b, grads)
    assert_same(theirs, ours)
    assert all(map(torch.equal, wanted, found))
    assert waiting == 2
    for p in (*theirs.parameters(), *ours.parameters()):
        p.grad = None
    plain(ours, a, grads)  # without a split it is the user's function and nothing else
    plain(theirs, a, grads)
    assert_same(theirs, ours)


def test_a_function_with_one_gradient_is_refused() -> None:
    with pytest.raises(rg.PipelineError, match=r"rg.defer\(scaled\): weight_grad is missing"):
        rg.defer(scaled, input_grad=lambda grad, x, weight: grad)
    with pytest.raises(rg.PipelineError, match="compute=3"):
        rg.defer(3)


def turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)


GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "row by row": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "every second row": lambda x: x[:, ::2],
    "part of each row": lambda x: x[..., :4],
    "expanded": lambda x: x[:1].expand(9, -1, -1),
}


@pytest.mark.parametrize("precision", ("full", "autocast"))
@pytest.mark.parametrize("name", GIVEN)
def test_biases_of_inputs_in_any_memory_order(name: str, precision: str) -> None:
    """Of an input with gaps or in another order torch adds the bias to the product, whose gradient it sums as it is."""
    torch.manual_seed(0)

    def use(m: Any, x: Tensor) -> Tensor:
        return turned(m.b(turned(m.a(GIVEN[name](x)).tanh())))

    width = GIVEN[name](rand(9, 30, 8)).shape[-1]
    theirs = Apply(use if precision == "full" else lowered(use), a=lin(width, 8), b=lin())
    ours = copy.deepcopy(theirs)
    a, b = leaves(lambda: rand(9, 30, 8) * 100)
    grads = [torch.randn_like(theirs(x)) for x in a]
    inputs = zip(plain(theirs, a, grads), split(ours, b, grads)[0], strict=True)
    assert all(torch.equal(one, other) for one, other in inputs)
    assert_same(theirs, ours)
