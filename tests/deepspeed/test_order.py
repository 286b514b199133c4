"""The order of calls: who divides, who counts, what a step that is not a boundary does, zeroing between backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde.deepspeed as deepspeed
from tests.deepspeed.pair import Pair, build_with_loss, config
from tests.harness import Ranks
from tests.reference import Program, in_one_window
from tests.small import batch
from tests.stages import EACH_STAGE


def _divided(divisor: int, *parts: int) -> Program:
    def program(model: nn.Module, rank: int) -> None:
        for part in parts:
            (model(batch(rank, part)) / divisor).backward()

    return program


def _by_count_and_by_hand(rank: int, world: int, stage: int) -> tuple[list[str], list[bool]]:
    """Four micro steps by count, then the documented loop by hand: one `step()` for all of them."""
    pair = Pair(rank, world, config(stage, 4))
    engine, boundaries = pair.engine, []
    for part in range(4):
        engine.backward(engine(batch(rank, part)))
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    pair.plain_play(_divided(4, 0, 1, 2, 3))
    pair.plain_step()
    for part in range(4):
        engine.set_gradient_accumulation_boundary(part == 3)
        engine.backward(engine(batch(rank, part)))
        boundaries.append(engine.is_gradient_accumulation_boundary())
    engine.step()
    pair.plain_play(_divided(4, 0, 1, 2, 3))
    pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong, boundaries


@EACH_STAGE
def test_boundaries_by_count_and_by_hand(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_by_count_and_by_hand, stage) == [([], [False, False, False, True] * 2)] * 2


def _not_a_boundary(rank: int, world: int, stage: int) -> dict[str, Any]:
    """`step()` that is not one changes neither weights nor gradients, and moves no schedule."""
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.5, "warmup_max_lr": 1.0, "warmup_num_steps": 4}}
    pair = Pair(rank, world, config(stage, 2, scheduler=schedule))
    engine = pair.engine
    engine.backward(engine(batch(rank, 0)))
    pair.plain_play(_divided(2, 0))
    before = engine.get_lr()
    engine.step()
    seen = {
        "weights": pair.wrong_weights(),
        "grads": pair.wrong_grads(),
        "rate": engine.get_lr() == before,
        "counts": (engine.micro_steps, engine.global_steps, engine.was_step_applied()),
        "norm": engine.get_global_grad_norm(),
    }
    engine.step()  # the second micro step: without a backward, with what is there
    seen["after"] = (engine.micro_steps, engine.global_steps, engine.was_step_applied())
    seen["cleared"] = all(p.grad is None for p in engine.parameters())
    seen["moved"] = engine.lr_scheduler.state_dict()
    pair.close()
    return seen


@EACH_STAGE
def test_a_step_that_is_not_a_boundary(ranks: Ranks, stage: int) -> None:
    for seen in ranks(2).run(_not_a_boundary, stage):
        assert seen["weights"] == [] and seen["grads"] == [] and seen["rate"] and seen["norm"] is None
        assert seen["counts"] == (1, 0, False) and seen["after"] == (2, 1, True)
        assert seen["cleared"] and seen["moved"] == {"last_batch_iteration": 0}


def _idle_rank(rank: int, world: int, stage: int, clipping: float) -> tuple[list[str], float]:
    """One rank has no data left, and steps all the same."""
    pair = Pair(rank, world, config(stage, gradient_clipping=clipping))

    def program(model: Any, rank: int) -> None:
        if rank == 0:
            model(batch(rank)).backward()

    program(pair.engine, rank)
    pair.engine.step()
    pair.plain_play(program)
    wanted = pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong, abs(pair.engine.get_global_grad_norm() / float(wanted) - 1)


@EACH_STAGE
def test_a_rank_without_data(ranks: Ranks, stage: int) -> None:
    for clipping in (0.0, 1e6):  # a norm that is never reached
        for wrong, off in ranks(2).run(_idle_rank, stage, clipping):
            assert wrong == [] and off <= 2 * torch.finfo(torch.float32).eps


def _zeroed(rank: int, world: int, stage: int, window: bool) -> list[str]:
    """`zero_grad()` between two backwards of one forward: the first ones are gone, in a window too."""
    pair = Pair(rank, world, config(stage, 2))
    engine = pair.engine

    def program() -> None:
        loss = engine(batch(rank))
        engine.backward(loss.square(), retain_graph=True)
        engine.zero_grad()
        engine.backward(loss)

    if window:
        with engine.coalesce_grad_reduction():
            program()
    else:
        program()
    pair.plain_play(_divided(2, 0))
    wrong = pair.wrong_grads()
    pair.close()
    return wrong


@EACH_STAGE
@pytest.mark.parametrize("window", (False, True))
def test_zero_grad_between_two_backwards_of_one_forward(ranks: Ranks, stage: int, window: bool) -> None:
    assert ranks(2).run(_zeroed, stage, window) == [[], []]


def _batch_sizes(rank: int, world: int) -> dict[str, Any]:
    """Another accumulation from here on; what was accumulated before stays divided as it was."""
    pair = Pair(rank, world, config(2, 2))
    engine = pair.engine
    engine.backward(engine(batch(rank, 0)))
    engine.set_train_batch_size(16)
    engine.backward(engine(batch(rank, 1)))
    pair.plain_play(_divided(2, 0))
    pair.plain_play(_divided(4, 1))
    seen: dict[str, Any] = {"wrong": pair.wrong_grads(), "accumulation": engine.gradient_accumulation_steps()}
    engine.set_train_micro_batch_size(3)
    seen["sizes"] = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu())
    with pytest.raises(deepspeed.ConfigError, match="train_batch_size=7 cannot be split; give a multiple of 6"):
        engine.set_train_batch_size(7)
    pair.close()
    return seen


def test_batch_sizes_may_change(ranks: Ranks) -> None:
    for seen in ranks(2).run(_batch_sizes):
        assert seen == {"wrong": [], "accumulation": 4, "sizes": (24, 3)}


def _wire(rank: int, world: int) -> tuple[list[str], int, int]:
    """`communication_data_type` is the dtype on the wire, `gradient_allreduce_op` the sum at stage 3 too."""
    asked = config(3, communication_data_type="bf16", gradient_allreduce_op="sum")
    engine, *_ = deepspeed.initialize(model=build_with_loss(), config=asked)
    engine.backward(engine(batch(rank)))
    grads = engine.sharded.full_grads()
    locally = [
        in_one_window(build_with_loss, 1, lambda model, _, r=r: model(batch(r)).backward()) for r in range(world)
    ]
    wrong = []
    for name, got in grads.items():
        rounded = [grads_of_rank[name].bfloat16().float() for grads_of_rank in locally]
        if not torch.equal(got, rounded[0] + rounded[1]):
            wrong.append(name)
    dist.barrier()
    elements = sum(unit.layout.padded_numel - unit.layout.shard_numel for unit in engine.sharded.units)
    return wrong, engine.sharded.ledger.bytes("reduce"), 2 * elements


def test_precision_and_sum_on_the_wire(ranks: Ranks) -> None:
    for wrong, sent, expected in ranks(2).run(_wire):
        assert wrong == [] and sent == expected
