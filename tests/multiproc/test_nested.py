"""Backwards inside backwards, on ranks that do not nest alike: each gradient counts once, on every rank, and nobody is
told of a failure that did not happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from tests.fuzz.play import Again
from tests.harness import Ranks
from tests.reference import Grads, in_one_window, same
from tests.small import Raises
from tests.stages import EACH_STAGE, REDUCING_STAGES

REFUSAL = ValueError("on purpose")

Forward = Callable[[nn.Module, Tensor], Tensor]
TIMEOUT = 10.0
LAYERS = 3


def _model() -> nn.Sequential:
    """Of whole numbers: sums are exact in any order, so that what is compared is what was added and not when."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(LAYERS)])
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-3, 4, param.shape))
    return model


def _input(rank: int) -> Tensor:
    return torch.tensor([[1.0 + rank, 2.0]], requires_grad=True)


class _Tiled(torch.autograd.Function):
    """Runs forward and backward of what it wraps in its own forward (a tiled loss), and hands the result on."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            loss = run(inside).sum()
            loss.backward()
        ctx.save_for_backward(inside.grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad * ctx.saved_tensors[0]


def _plainly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def _checkpointed_at(*layers: int) -> Forward:
    """Reentrant: each such layer has a backward of its own."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for index, layer in enumerate(model):
            x = checkpoint(layer, x, use_reentrant=True) if index in layers else layer(x)
        return x.sum()

    return forward


def _again_at(*layers: int) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for index, layer in enumerate(model):
            x = Again.apply(layer, x) if index in layers else layer(x)
        return x.sum()

    return forward


def _tiled_after(first: int) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return _Tiled.apply(model[first:], model[:first](x))

    return forward


def _same_unit_inside(model: nn.Module, x: Tensor) -> Tensor:
    """The backward inside brings gradients of the unit whose gradient the one around it has sent already."""
    h = Again.apply(lambda h: model[2](model[1](h)), model[0](x))
    return model[2](h).sum()


def _nested_twice(model: nn.Module, x: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return model[1](Again.apply(model[2], h))

    return Again.apply(inner, model[0](x)).sum()


FORWARDS: dict[str, Forward] = {
    "plain": _plainly,
    "checkpoint first": _checkpointed_at(0),
    "checkpoint middle": _checkpointed_at(1),
    "checkpoint all": _checkpointed_at(0, 1, 2),
    "again first": _again_at(0),
    "again two": _again_at(0, 2),
    "tiled": _tiled_after(1),
    "same unit inside": _same_unit_inside,
    "nested twice": _nested_twice,
}
PAIRS = [(one, "plain") for one in FORWARDS if one != "plain"] + [
    ("checkpoint first", "checkpoint all"),
    ("checkpoint middle", "again two"),
    ("tiled", "again first"),
    ("same unit inside", "checkpoint first"),
    ("nested twice", "tiled"),
    ("same unit inside", "nested twice"),
]


def _expected(names: list[str], backwards: int) -> Grads:
    def program(model: nn.Module, rank: int) -> None:
        for _ in range(backwards):
            FORWARDS[names[rank]](model, _input(rank)).backward()

    return in_one_window(_model, len(names), program)


def _train(rank: int, world: int, stage: int, names: list[str], late: int, exact: bool = True) -> list[str]:
    model = _model()
    engine = rg.shard(model, stage, units=[nn.Linear], timeout=TIMEOUT, exact=exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backwards = 2
    for _ in range(backwards):
        loss = FORWARDS[names[rank]](model, _input(rank))
        if rank == late:
            time.sleep(0.2)  # the others' parts are there before this rank looks
        loss.backward()
    optimizer.step()
    grads = engine.full_grads()
    left = [unit.name for unit in engine.units if unit.page.ready and not unit.stays]
    dist.barrier()
    expected = _expected(names, backwards)
    wrong = [name for name, grad in expected.items() if not same(grads[name], grad)]
    return wrong + [f"page of {name}" for name in left]


@pytest.mark.parametrize("late", (0, 1))
@EACH_STAGE
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_ranks_that_nest_differently(ranks: Ranks, pair: tuple[str, str], stage: int, late: int) -> None:
    assert ranks(2).run(_train, stage, list(pair), late) == [[], []]


@pytest.mark.parametrize("late", (0, 1))
def test_the_backends_sum_too(ranks: Ranks, late: int) -> None:
    assert ranks(2).run(_train, 3, ["checkpoint first", "plain"], late, exact=False) == [[], []]


def test_four_ranks_that_nest_differently(ranks: Ranks) -> None:
    names = ["plain", "checkpoint first", "same unit inside", "tiled"]
    assert ranks(4).run(_train, 2, names, 2) == [[]] * 4


def _raises_around(rank: int, world: int, stage: int) -> list[str]:
    """The outer backward of rank 0 raises after one inside it has met the others: what they were told of counts."""
    model = _model()
    engine = rg.shard(model, stage, units=[nn.Linear], timeout=TIMEOUT)
    x = _input(rank)
    if rank == 0:
        loss = model[2](Again.apply(model[1], Raises.apply(model[0](x), REFUSAL))).sum()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
    else:
        model[2](model[1](x)).sum().backward()
    grads = engine.full_grads()
    dist.barrier()

    def program(plain: nn.Module, each: int) -> None:
        x = plain[0](_input(0)) if each == 0 else _input(each)
        plain[2](plain[1](x)).sum().backward()
        plain[0].zero_grad()  # its gradient had not come when the backward raised

    expected = in_one_window(_model, world, program)
    return [name for name, grad in expected.items() if not same(grads[name], grad)]


@REDUCING_STAGES
def test_what_was_added_up_survives_the_backward_around_it(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_raises_around, stage) == [[], []]


def _raises_inside(rank: int, world: int, stage: int) -> list[str]:
    """A backward inside another one raises and is caught there: its gradients do not count, those around it do."""

    class Tries(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.save_for_backward(h)
            return h.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = model[2](Raises.apply(model[1](ctx.saved_tensors[0].detach()), REFUSAL)).sum()
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
            return grad

    model = _model()
    engine = rg.shard(model, stage, units=[nn.Linear], timeout=TIMEOUT)
    model[2](Tries.apply(model[0](_input(rank)))).sum().backward()
    grads = engine.full_grads()
    dist.barrier()
    expected = in_one_window(_model, world, lambda plain, each: plain[2](plain[0](_input(each))).sum().backward())
    return [name for name, grad in expected.items() if not same(grads[name], grad)]


@REDUCING_STAGES
def test_a_backward_given_up_inside_another_one(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_raises_inside, stage) == [[], []]
