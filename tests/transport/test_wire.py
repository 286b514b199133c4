"""What travels: gradients in another dtype than their own, small units together, and buckets that are given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import retrograde as rg
from tests.harness import RankPool
from tests.reference import mean
from tests.small import BLOCKS, Block, backward_that_raises, batch, build, loss_of
from tests.stages import EACH_STAGE, EACH_WORLD

Ranks = Callable[[int], RankPool]
BACKWARDS = 3


def _local(rank: int, backwards: int) -> dict[str, Tensor]:
    """What one rank has accumulated, in fp32."""
    model = build()
    for step in range(backwards):
        loss_of(model, batch(rank, step)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _expected(world: int, backwards: int, wire: torch.dtype) -> dict[str, Tensor]:
    """Every rank's gradient rounded to the wire's dtype, added up in fp32 in rank order, and divided once."""
    ranks = [_local(rank, backwards) for rank in range(world)]
    return {name: mean([grads[name].to(wire).float() for grads in ranks], world) for name in ranks[0]}


def _travelled(rank: int, world: int, stage: int, precision: Any, window: bool) -> dict[str, Any]:
    model = build()
    engine = rg.shard(model, stage, precision=precision)
    wire = torch.float32 if precision is None else precision.wire or torch.float32
    if window:
        with engine.coalesce():
            for step in range(BACKWARDS):
                loss_of(model, batch(rank, step)).backward()
    else:
        loss_of(model, batch(rank)).backward()
    got = engine.full_grads()
    want = _expected(world, BACKWARDS if window else 1, wire)
    plain = _expected(world, BACKWARDS if window else 1, torch.float32)
    return {
        "wrong": [name for name, grad in got.items() if grad is None or not torch.equal(grad, want[name])],
        "rounded": any(not torch.equal(want[name], plain[name]) for name in want),
        "dtypes": {grad.dtype for grad in got.values() if grad is not None},
        "sent": engine.ledger.bytes("reduce"),
        "elements": sum(unit.layout.padded_numel - unit.layout.shard_numel for unit in engine.units),
    }


@EACH_WORLD
@EACH_STAGE
@pytest.mark.parametrize("window", (False, True))
def test_gradients_travel_in_the_dtype_asked_for(ranks: Ranks, stage: int, world: int, window: bool) -> None:
    for seen in ranks(world).run(_travelled, stage, rg.Precision(reduce="bf16"), window):
        assert seen["wrong"] == [] and seen["rounded"] and seen["dtypes"] == {torch.float32}
        assert seen["sent"] == 2 * seen["elements"]


@pytest.mark.parametrize("reduce", (None, "fp32", torch.float16, torch.float64))
def test_other_dtypes(ranks: Ranks, reduce: Any) -> None:
    size = {None: 4, "fp32": 4, torch.float16: 2, torch.float64: 8}[reduce]
    for seen in ranks(2).run(_travelled, 3, rg.Precision(reduce=reduce), False):
        assert seen["wrong"] == [] and seen["rounded"] == (reduce is torch.float16)
        assert seen["sent"] == size * seen["elements"]


def _joined(rank: int, world: int, stage: int, join: int) -> dict[str, Any]:
    model = build()
    engine = rg.shard(model, stage, join=join)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        engine.ledger.clear()
        optimizer.zero_grad()
        loss_of(model, batch(rank)).backward()
        grads = engine.full_grads()
        want = _expected(world, 1, torch.float32) if step == 0 else grads
        wrong = [name for name, grad in grads.items() if grad is None or not torch.equal(grad, want[name])]
        assert wrong == []
        optimizer.step()
    return {
        "units": [unit.name for unit in engine.units],
        "reductions": engine.ledger.count("reduce"),
        "gathers": engine.ledger.count("gather"),
    }


BLOCK = sum(p.nbytes for p in Block().parameters())


@EACH_STAGE
@pytest.mark.parametrize(("join", "units"), ((0, BLOCKS), (BLOCK, BLOCKS), (BLOCK + 1, BLOCKS // 2), (10**9, 1)))
def test_small_units_are_joined(ranks: Ranks, stage: int, join: int, units: int) -> None:
    for seen in ranks(2).run(_joined, stage, join):
        assert len(seen["units"]) == 1 + units and seen["units"][0] == "(root)"
        assert seen["reductions"] == 1 + units
        # At stage 3 the last unit of the forward is not read again, and of two units neither is.
        assert seen["gathers"] == (1 + units if stage < 3 or units == 1 else 2 * (1 + units) - 1)


def _raises_then_trains(rank: int, world: int) -> tuple[int, int]:
    """Bytes of buckets in use after backwards that raised, with sums by collectives."""
    model = build()
    engine = rg.shard(model, 3, exact=False)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            backward_that_raises(model, batch(rank))
        model.zero_grad()
    left = engine.buckets.used
    loss_of(model, batch(rank)).backward()
    model.zero_grad()
    return left, engine.buckets.used


def _raises_at_a_leaf(rank: int, world: int) -> int:
    """The same, where what was launched has been reduced already."""
    model = build()
    engine = rg.shard(model, 3, exact=False)
    hook = next(model.parameters()).register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(rank)).backward()
    hook.remove()
    model.zero_grad()
    return engine.buckets.used


def _fail(grad: Tensor) -> None:
    raise ZeroDivisionError


def test_backwards_that_raise_leave_no_buckets(ranks: Ranks) -> None:
    assert ranks(2).run(_raises_then_trains) == [(0, 0)] * 2
    assert ranks(2).run(_raises_at_a_leaf) == [0, 0]
