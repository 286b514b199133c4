"""Collectives on the device: queued, carried by gloo, and waiting for one blocks a stream and not the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.device import Tally
from tests.accelerator.ranks import EACH_MODE, each_case
from tests.harness import Ranks

Case = Callable[[int], None]


def _mine(rank: int, *shape: int) -> Tensor:
    return torch.full(shape, rank + 1.0, device="late")


def all_gather(rank: int) -> None:
    out = torch.empty(8, device="late")
    dist.all_gather_single(out, _mine(rank, 4))
    assert out.tolist() == [1.0] * 4 + [2.0] * 4
    parts = [torch.empty(4, device="late") for _ in range(2)]
    dist.all_gather(parts, _mine(rank, 4))
    assert [part.sum().item() for part in parts] == [4, 8]


def reduce_scatter(rank: int) -> None:
    for op, value in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2.0)):
        out = torch.empty(4, device="late")
        dist.reduce_scatter_single(out, _mine(rank, 8), op=op)
        assert out.tolist() == [value] * 4
    dist.reduce_scatter(out, [_mine(rank, 4), 10 * _mine(rank, 4)])
    assert out.tolist() == [3.0 * 10**rank] * 4


def all_reduce(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = _mine(rank, 5).to(dtype)
        dist.all_reduce(x)
        assert x.tolist() == [3] * 5


def all_to_all(rank: int) -> None:
    out = torch.empty(4, device="late")
    dist.all_to_all_single(out, torch.arange(4.0, device="late") + 10 * rank)
    assert out.tolist() == ([0, 1, 10, 11], [2, 3, 12, 13])[rank]
    uneven = torch.empty((2, 4)[rank], device="late")
    dist.all_to_all_single(uneven, torch.arange(3.0, device="late"), [1 + rank] * 2, [1, 2])
    assert uneven.tolist() == ([0, 0], [1, 2, 1, 2])[rank]


def one_to_all(rank: int) -> None:
    x = _mine(rank, 5)
    dist.broadcast(x, 1)
    assert x.tolist() == [2.0] * 5
    dist.reduce(x, 0)
    assert rank == 1 or x.tolist() == [4.0] * 5
    parts = [torch.empty(2, device="late") for _ in range(2)]
    dist.gather(_mine(rank, 2), parts if rank == 0 else None, dst=0)
    assert rank == 1 or [part.tolist() for part in parts] == [[1, 1], [2, 2]]
    dist.scatter(parts[0], [_mine(5, 2), _mine(6, 2)] if rank == 0 else None, src=0)
    assert parts[0].tolist() == [6 + rank] * 2


def point_to_point(rank: int) -> None:
    ours, theirs = _mine(rank, 6), torch.empty(6, device="late")
    both = [dist.P2POp(dist.isend, ours, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert theirs.tolist() == [2.0 - rank] * 6
    if rank == 0:
        dist.send(ours, 1)
    else:
        dist.recv(theirs, 0)
        assert theirs.tolist() == [1.0] * 6


def coalesced(rank: int) -> None:
    outs = [torch.empty(4, device="late") for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("late")):
        for out in outs:
            dist.all_gather_single(out, _mine(rank, 2))
    assert [out.tolist() for out in outs] == [[1, 1, 2, 2]] * 2


def functional_collectives(rank: int) -> None:
    gathered = functional.all_gather_single(_mine(rank, 2), 0, dist.group.WORLD)
    assert gathered.tolist() == [1, 1, 2, 2]


def groups_in_any_order(rank: int) -> None:
    """Ranks ask for results of two groups in opposite orders, which no device minds."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    values = [_mine(rank, 3), 10 * _mine(rank, 3)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(values, groups, strict=True)]
    for number in (0, 1) if rank == 0 else (1, 0):
        works[number].wait()
        assert values[number].tolist() == [3.0 * 10**number] * 3


def a_host_that_waits_elsewhere(rank: int) -> None:
    """Rank 1 never asks for its result and waits on the CPU, for rank 0, which needs its contribution."""
    x = _mine(rank, 3)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        work.wait()
        assert x.tolist() == [3.0] * 3
    host = torch.ones(1)
    dist.all_reduce(host)
    work.wait()


def a_barrier_waits_for_the_others(rank: int) -> None:
    dist.barrier(device_ids=[torch.accelerator.current_device_index()])  # without them it is one of the CPU
    assert device.synchronisations() == {"barrier": 1}


def _run(rank: int, world: int, case: Case, mode: str, seed: int) -> None:
    device.of_rank(rank)
    with device.use(mode, seed):
        case(rank)
    dist.barrier()


@EACH_MODE
@each_case(
    all_gather,
    reduce_scatter,
    all_reduce,
    all_to_all,
    one_to_all,
    point_to_point,
    coalesced,
    functional_collectives,
    groups_in_any_order,
    a_host_that_waits_elsewhere,
    a_barrier_waits_for_the_others,
)
def test_collectives(late_ranks: Ranks, case: Case, mode: str, seed: int) -> None:
    late_ranks(2).run(_run, case, mode, seed)


def _forgotten(rank: int, world: int, mode: str, seed: int) -> list[str]:
    """Reads the result of a gather, and overwrites its input, without waiting for it."""
    device.of_rank(rank)
    with device.use(mode, seed):
        out, mine = torch.empty(8, device="late"), _mine(rank, 4)
        work = dist.all_gather_single(out, mine, async_op=True)
        mine.zero_()
        out.sum()
        found = device.races()
        work.wait()
        assert mine.sum().item() == 0
    dist.barrier()
    return found


@EACH_MODE
def test_a_forgotten_wait_is_a_race(late_ranks: Ranks, mode: str, seed: int) -> None:
    for rank, found in enumerate(late_ranks(2).run(_forgotten, mode, seed)):
        assert len(found) == 2
        for race, words in zip(found, ("aten::zero_ on stream", "aten::sum.dim_IntList on stream"), strict=True):
            assert words in race
            assert f"that c10d::all_gather_single on stream {rank}:" in race


def _read_meanwhile(rank: int, world: int) -> tuple[list[str], list[float], list[float]]:
    """What a rank brings to a gather in place is not written, so that it may be read meanwhile; the rest may not."""
    device.of_rank(rank)
    with device.use("lazy"):
        out = torch.zeros(8, device="late")
        mine = out[4 * rank : 4 * rank + 4].fill_(rank + 1.0)
        work = dist.all_gather_single(out, mine, async_op=True)
        during = mine + 0
        allowed = device.races()
        torch.add(out, 0)
        found = device.races()
        work.wait()
        seen = [during.cpu().tolist(), out.cpu().tolist()]
    dist.barrier()
    return [*allowed, f"{len(found)} for the rest"], *seen


def test_a_gather_in_place_leaves_its_input_alone(late_ranks: Ranks) -> None:
    whole = [1.0] * 4 + [2.0] * 4
    expected = [(["1 for the rest"], [rank + 1.0] * 4, whole) for rank in range(2)]
    assert late_ranks(2).run(_read_meanwhile) == expected


def _counted(rank: int, world: int) -> dict[str, Any]:
    device.of_rank(rank)
    with device.use("lazy"):
        out = torch.empty(8, device="late")
        work = dist.all_gather_single(out, _mine(rank, 4), async_op=True)
        work.wait()
        out.add_(1)
        counted = {
            "waits": device.synchronisations(),
            "copies": device.copies(),
            "collectives": device.collectives(),
        }
    dist.barrier()
    return counted


def test_counters(late_ranks: Ranks) -> None:
    expected = {"waits": {}, "copies": {}, "collectives": {"all_gather_single": Tally(1, 32)}}
    assert late_ranks(2).run(_counted) == [expected] * 2


def _unequal(rank: int, world: int) -> str:
    """A mistake that gloo notices."""
    device.of_rank(rank)
    x = torch.ones(4, device="late")
    dist.all_gather_single(torch.empty(9, device="late"), x)
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def test_failures_name_the_collective(late_ranks: Ranks) -> None:
    for message in late_ranks(2).run(_unequal):
        assert "asynchronous failure of c10d::all_gather_single" in message
