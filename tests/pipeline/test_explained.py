"""What `pipe.explain()` says: nobody is to believe in work that waits and does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.pipeline.account import UNSEEN, Account, table
from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters
from tests.pipeline.halves import Apply, deferred, experts, fused, image, lin, rand, tokens

Function = Callable[[Any, Tensor], Tensor]
MATRIX = 2 * 24 * 8 * 8  # FLOPs of the gradient of a matrix of 8 by 8, for 24 tokens


def explained(model: nn.Module, x: Tensor) -> list[str]:
    """The lines about two steps of a microbatch; the account is kept of the first."""
    account = Account()
    parameters = StageParameters(model)
    for own in (account, None):
        split = SplitBackward(parameters, own)
        entered = x.clone().requires_grad_()
        with split.recording():
            out = model(entered)
        split.run_inputs([out], [torch.ones_like(out)])
        split.run_weights()
    return table(account.works({id(p): name for name, p in model.named_parameters()})).splitlines()


def of(fn: Function, **parts: Any) -> list[str]:
    torch.manual_seed(0)
    return explained(Apply(fn, **parts), tokens())


def test_all_that_is_known_waits() -> None:
    assert of(lambda m, x: m.a(x), a=lin()) == [
        f"100.0% of the weight gradients' work waits for W ({MATRIX:,} FLOPs a microbatch)"
    ]


def test_a_function_of_the_user_makes_the_share_a_bound() -> None:
    assert of(lambda m, x: fused(m.a(x), m.b.weight, m.b.bias), a=lin(), b=lin()) == [
        f"at most 100.0% of the weight gradients' work waits for W ({MATRIX:,} FLOPs a microbatch, "
        "and unknown work besides)",
        f"  in I: {UNSEEN}, unknown: b.weight, b.bias",
    ]


def test_a_weight_that_waits_in_one_use_and_not_in_another() -> None:
    """The second use is inside a Function of the user, where no mode sees it."""
    assert of(lambda m, x: fused(m.a(x), m.a.weight, m.a.bias), a=lin()) == [
        f"at most 100.0% of the weight gradients' work waits for W ({MATRIX:,} FLOPs a microbatch, "
        "and unknown work besides)",
        f"  in I: {UNSEEN}, unknown: a.weight, a.bias",
    ]


def test_nothing_that_can_be_counted_is_not_everything() -> None:
    assert of(lambda m, x: fused(x, m.a.weight, m.a.bias), a=lin()) == [
        "no share of the weight gradients' work is known to wait for W: none of it can be counted",
        f"  in I: {UNSEEN}, unknown: a.weight, a.bias",
    ]
    assert of(lambda m, x: m.n(x), n=nn.LayerNorm(8)) == [
        "no share of the weight gradients' work is known to wait for W: there is none that counts",
        "  in I: layer_norm, 0.0%: n.weight, n.bias",
    ]


def refuses(grad: Tensor, x: Tensor) -> Tensor:
    """A kernel that needs data."""
    if grad.device.type == "meta":
        raise NotImplementedError("no kernel for tensors without data")
    return grad.flatten(0, 1).t() @ x.flatten(0, 1)


def named(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


without_count = rg.defer(named, input_grad=lambda grad, x, weight: grad @ weight, weight_grad=refuses)


def test_formulas_that_nobody_can_count() -> None:
    waits = ["  in W: named, unknown: w"]
    assert of(lambda m, x: without_count(m.a(x), m.w), a=lin(), w=rand(8, 8)) == [
        f"at least 100.0% of the weight gradients' work waits for W ({MATRIX:,} FLOPs a microbatch, "
        "and unknown work besides)",
        *waits,
    ]
    assert of(lambda m, x: fused(without_count(m.a(x), m.w), *m.b.parameters()), a=lin(), w=rand(8, 8), b=lin()) == [
        f"of what is counted, 100.0% of the weight gradients' work waits for W ({MATRIX:,} FLOPs a microbatch, "
        "and unknown work besides)",
        *waits,
        f"  in I: {UNSEEN}, unknown: b.weight, b.bias",
    ]


def test_a_use_of_a_view_has_its_name_and_share() -> None:
    assert of(lambda m, x: torch.einsum("bti,io->bto", m.a(x), m.w.view(8, 8)), a=lin(), w=rand(64)) == [
        f"50.0% of the weight gradients' work waits for W ({2 * MATRIX:,} FLOPs a microbatch)",
        "  in I: einsum, 50.0%: w",
    ]


def test_a_parameter_that_is_not_used_is_no_work() -> None:
    assert len(of(lambda m, x: m.a(x), a=lin(), b=lin())) == 1


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_recompute_is_not_counted_again(reentrant: bool | None) -> None:
    def part(m: Any, x: Tensor) -> Tensor:
        return m.a(torch.einsum("bti,io->bto", x, m.w).tanh())  # a recompute ends before its last product has run

    def run(m: Any, x: Tensor) -> Tensor:
        once = part(m, x) if reentrant is None else checkpoint(part, m, x, use_reentrant=reentrant)
        return m.b(once)

    assert of(run, a=lin(), w=rand(8, 8), b=lin()) == [
        f"66.7% of the weight gradients' work waits for W ({3 * MATRIX:,} FLOPs a microbatch)",
        "  in I: einsum, 33.3%: w",
    ]


# ---- what could wait and does not: the list in docs/design/split_backward.md
COMPILED: dict[str, tuple[Function, Callable[[], Tensor], Tensor]] = {
    "experts": (experts, lambda: tokens().bfloat16(), rand(3, 8, 8).bfloat16()),  # compiled, there are no others
    "a transposed convolution": (lambda m, x: F.conv_transpose2d(x, m.w), image, rand(4, 6, 3, 3)),
    "the weight on the left": (lambda m, x: m.w @ x[0].t(), tokens, rand(5, 8)),
    "a view of a weight": (lambda m, x: x @ m.w.t(), tokens, rand(5, 8)),
    "a weight in several products of a batch": (
        lambda m, x: x.unflatten(-1, (2, 4)).transpose(1, 2) @ m.w,
        tokens,
        rand(2, 4, 3),
    ),
    "padding by name": (lambda m, x: F.conv2d(x, m.w, padding="same"), image, rand(6, 4, 3, 3)),
    "a convolution of one image": (lambda m, x: F.conv2d(x[0], m.w), image, rand(6, 4, 3, 3)),
    "batches of several dimensions": (lambda m, x: x.unflatten(-1, (2, 4)) @ m.w, tokens, rand(4, 6, 4, 3)),
    "within a checkpoint": (
        lambda m, x: checkpoint(lambda x: x @ m.w, x, use_reentrant=False),
        tokens,
        rand(8, 5),
    ),
    "a function given to rg.defer": (lambda m, x: deferred(x, m.w), tokens, rand(5, 8)),
}


@pytest.mark.filterwarnings("ignore")  # Dynamo uses what torch deprecates
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_regions_list_what_does_not_wait(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, make_input, weight = COMPILED[name]
    model = Apply(fn, w=weight)
    assert explained(model, make_input())[0].startswith("100.0% of"), "not compiled, it waits"
    model.compile(backend="aot_eager")
    assert explained(model, make_input()) == [
        "no share of the weight gradients' work is known to wait for W: none of it can be counted",
        f"  in I: {UNSEEN}, unknown: w",
    ]
    torch._dynamo.reset()


def test_experts_under_autocast_are_done_in_i() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return experts(m, m.a(x).float()).float()

    matrices = 2 * 24 * 8 * 4  # a row goes to one expert
    assert of(run, a=lin(), w=rand(3, 8, 4)) == [
        f"66.7% of the weight gradients' work waits for W ({MATRIX + matrices:,} FLOPs a microbatch)",
        "  in I: _grouped_mm, 33.3%: w",
    ]
