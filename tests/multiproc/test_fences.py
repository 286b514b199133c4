"""Edits while ranks are at different places: the slow one in the middle of its edits, or one that reads in between."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.small import DIM, Block, batch
from tests.stages import OPPOSITE_STAGES, PAGE_STAGES

SLOW = pytest.mark.parametrize("slow", (0, 1), ids=("rank 0 slow", "rank 1 slow"))
LIMIT: dict[str, Any] = {"timeout": 6}


def _stack() -> nn.Module:
    """No parameter of the root at both ends: its first unit is whole long before the last is edited."""
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(5)))


def _through_leaves(rank: int, world: int, stage: int, slow: int) -> None:
    twin = Twin(rank, world, stage, _stack, **LIMIT)
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        with torch.no_grad():
            for model in twin.both:
                for param in model.parameters():
                    param.mul_(0.5)
                    time.sleep(0.005 * (model is twin.model and rank == slow))
            assert torch.equal(twin.model(x), twin.plain(x))
    twin.check_weights()
    twin.close()


@SLOW
@PAGE_STAGES
def test_a_reader_does_not_stop_the_edits_of_others(ranks: Ranks, stage: int, slow: int) -> None:
    ranks(2).run(_through_leaves, stage, slow)


def _through_full(rank: int, world: int, stage: int, slow: int) -> None:
    """The loop variable keeps a page alive on one rank or another; then another edit follows."""
    twin = Twin(rank, world, stage, **LIMIT)
    expected = dict(twin.plain.named_parameters())
    for step in range(3):
        with twin.engine.full_params(write=True) as full:
            for name, tensor in full.items():
                tensor.mul_(0.5)
                expected[name].data.mul_(0.5)
                time.sleep(0.005 * (rank == slow))
        twin.check_weights()
        with twin.engine.full_params(twin.model.blocks[2], write=True):
            twin.model.blocks[2].up.weight.fill_(0.125)
        expected["blocks.2.up.weight"].data.fill_(0.125)
        assert torch.equal(twin.model(batch(rank)), twin.plain(batch(rank))), step
    twin.close()


@SLOW
@PAGE_STAGES
def test_full_params_with_a_slow_rank(ranks: Ranks, stage: int, slow: int) -> None:
    ranks(2).run(_through_full, stage, slow)


def _one_evaluates(rank: int, world: int, stage: int, swap: str) -> None:
    """Swap the average in, evaluate on rank 0 only, swap back: the others are ahead, at their second edit."""
    twin = Twin(rank, world, stage, **LIMIT)
    twin.optimize()
    averages = [[p.detach().clone() for p in model.parameters()] for model in twin.both]
    for step in range(2):
        twin.train(step)
        seen = []
        for model, average in zip(twin.both, averages, strict=True):
            params = list(model.parameters())
            kept = [p.detach().clone() for p in params]
            _put(params, average, swap)
            if rank == 0:
                time.sleep(0.1 * (model is twin.model))
                with torch.no_grad():
                    seen.append(model(batch(0, 60)))
            _put(params, kept, swap)
        if rank == 0:
            assert torch.equal(*seen), step
        if step == 0:
            dist.barrier()
    twin.train(5)
    twin.check_weights()
    twin.close()


@torch.no_grad()
def _put(params: list[torch.Tensor], values: list[torch.Tensor], swap: str) -> None:
    if swap == "foreach":
        torch._foreach_copy_(params, values)
    else:
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


@pytest.mark.parametrize("swap", ("copy", "foreach"))
@PAGE_STAGES
def test_one_rank_evaluates_between_edits(ranks: Ranks, stage: int, swap: str) -> None:
    ranks(2).run(_one_evaluates, stage, swap)


def _read_between(rank: int, world: int, stage: int) -> bool:
    """One of two weights was edited before, so the edit of both needs a fence, which must not forget the other."""
    model = _stack()
    engine = rg.shard(model, stage, timeout=20.0)
    first, *_, second = model.parameters()
    assert first.unit is not second.unit
    wanted = first.shown().detach() * 0.5
    fence = engine.coordinator.pass_fence

    def slow(what: str) -> None:
        fence(what)
        time.sleep(0.5 * (rank == 0 and "foreach" in what))

    engine.coordinator.pass_fence = slow
    with torch.no_grad():
        second.mul_(3.0)
        torch._foreach_mul_([first, second], 0.5)
    found = torch.equal(first.shown().detach(), wanted)
    dist.barrier()
    return found


@OPPOSITE_STAGES
def test_a_fence_in_an_edit_of_several(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_read_between, stage) == [True, True]


def _in_another_order(rank: int, world: int, stage: int) -> None:
    """The same edit on both ranks, before and after another meeting."""
    model = _stack()
    engine = rg.shard(model, stage, timeout=10.0)
    weight, optimizer = list(model.parameters())[-1], torch.optim.SGD(model.parameters(), lr=0.1)
    with engine.no_sync():
        model(torch.ones(2, DIM)).sum().backward()
    for action in ("edit", "read") if rank == 0 else ("read", "edit", "use"):
        if action == "edit":
            with torch.no_grad():
                weight.mul_(0.5)
        elif action == "read":
            assert weight.grad is not None
        else:
            model(torch.ones(2, DIM))
    optimizer.step()
    model(torch.ones(2, DIM))
    dist.barrier()


@OPPOSITE_STAGES
def test_the_same_edit_in_another_order(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_in_another_order, stage)
