"""A process group of the user's that has other backends than the default group: calls go by the user's."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from retrograde.devices import HOST, streams_of
from retrograde.transport import ProcessRanks
from tests.accelerator import device, pipelines
from tests.accelerator.ranks import LateSeat
from tests.endings import run_to_the_end
from tests.pipeline.cases import CASES, backward_order, compare, plain_step
from tests.reference import play, same
from tests.small import backwards, batch, build, loss_of
from tests.transport.hosts import apart

pytestmark = pytest.mark.timeout(120)
WORLD = 2


class GlooSeat(LateSeat):
    """The default group is for the host's memory alone."""

    backend = "gloo"


def _trains(rank: int, world: int) -> None:
    """After an engine of the default group, whose own group has the same ranks and is free."""
    where = device.of_rank(rank)
    model = build()
    rg.shard(model, transport="collective", timeout=20.0)
    dist.barrier()
    del model
    gc.collect()
    group = dist.new_group(backend=device.BACKEND)
    model = device.move(build(), where)
    engine = rg.shard(model, process_group=group, exact=True, timeout=20.0)
    loss_of(model, batch(rank).to(where)).backward()
    plain = build()
    play(plain, world, backwards(0), 3)
    for name, param in plain.named_parameters():
        assert same(engine.full_grad(name).cpu(), param.grad), name
    dist.barrier()


def _steps_in_a_pipeline(rank: int, world: int) -> None:
    where = device.of_rank(rank)
    group = dist.new_group(backend=device.BACKEND)
    torch.manual_seed(0)
    case = CASES["plain"]
    blocks = case.blocks()
    pipe = pipelines.pipeline_of(case, blocks, where, "1f1b", mesh=group)
    data = case.data()
    plain_step(blocks, data, case.loss, backward_order(pipe.schedule))
    pipelines.step(pipe, data, where)
    assert compare("plain", pipe, blocks, case) == []
    dist.barrier()


def _has_two_groups(rank: int, world: int) -> None:
    """Between hosts collectives are the default if the user's group has a backend for the host's memory."""
    groups = {backend: dist.new_group(backend=backend) for backend in ("late:late", "gloo")}
    with apart():
        found = {backend: ProcessRanks(group).should_call(streams_of(HOST)) for backend, group in groups.items()}
    assert found == {"late:late": False, "gloo": True}
    dist.barrier()


@pytest.mark.parametrize("program", (_trains, _steps_in_a_pipeline, _has_two_groups))
def test_calls_go_by_the_backends_of_the_users_group(program: object) -> None:
    for ending in run_to_the_end(program, WORLD, seat=GlooSeat):  # type: ignore[arg-type]
        assert (ending.code, ending.said) == (0, ""), ending
