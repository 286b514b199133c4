"""FSDP2 as a check of the device: right where it is right, and caught where one of its waits is taken out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

from tests.accelerator import device
from tests.accelerator.ranks import EACH_MODE
from tests.accelerator.training import sharded, train
from tests.harness import Ranks

CPU = torch.device("cpu")


def _trained(rank: int, world: int, mode: str, seed: int) -> bool:
    want = train("gpt", sharded("gpt", CPU, world), CPU, rank)
    where = device.of_rank(rank)
    model = sharded("gpt", where, world)
    with device.use(mode, seed):
        got = train("gpt", model, where, rank)
    dist.barrier()
    return len(got) == len(want) > 0 and all(map(torch.equal, got, want))


@EACH_MODE
def test_like_gloo_on_the_cpu(late_ranks: Ranks, mode: str, seed: int) -> None:
    assert late_ranks(2).run(_trained, mode, seed) == [True, True]


@contextlib.contextmanager
def without_waiting_for_the_gather() -> Iterator[None]:
    """The copy out of the gathered parameters waits for neither the gather's event nor its work."""
    real = collectives.foreach_all_gather_copy_out

    def hasty(result: Any, params: Any, group: Any) -> None:
        real(result._replace(all_gather_event=None, all_gather_work=None), params, group)

    with mock.patch.object(param_group, "foreach_all_gather_copy_out", hasty):
        yield


class _Deaf(torch.Stream):
    def wait_stream(self, other: torch.Stream) -> None:
        pass


@contextlib.contextmanager
def without_waiting_for_the_gradients() -> Iterator[None]:
    """The reduction's stream does not wait for the stream that wrote the gradients."""
    real = param_group.FSDPCommContext.lazy_init

    def lazy_init(self: Any, *args: Any) -> None:
        real(self, *args)
        self.reduce_scatter_stream = _Deaf(torch.device("late", torch.accelerator.current_device_index()))

    with mock.patch.object(param_group.FSDPCommContext, "lazy_init", lazy_init):
        yield


Mutation = Callable[[], contextlib.AbstractContextManager[None]]
# What races: the one that was issued later, and the one before it.
EXPECTED = {
    without_waiting_for_the_gather: ("copy on the device", "c10d::all_gather_single"),
    without_waiting_for_the_gradients: ("c10d::reduce_scatter_single", "aten::cat"),
}


def _broken(rank: int, world: int, mutation: Mutation, mode: str, seed: int) -> list[str]:
    where = device.of_rank(rank)
    model = sharded("gpt", where, world)
    with mutation(), device.use(mode, seed):
        train("gpt", model, where, rank)
        found = device.races()
    dist.barrier()
    return found


@EACH_MODE
@pytest.mark.parametrize("mutation", EXPECTED, ids=lambda mutation: mutation.__name__)
def test_a_wait_taken_out_is_named(late_ranks: Ranks, mutation: Mutation, mode: str, seed: int) -> None:
    later, earlier = EXPECTED[mutation]
    for rank, found in enumerate(late_ranks(2).run(_broken, mutation, mode, seed)):
        assert any(race.startswith(f"{later} on stream {rank}:") and f"that {earlier}" in race for race in found), found
