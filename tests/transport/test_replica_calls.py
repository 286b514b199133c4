"""Replicas of a sharded model by collectives: exact on every rank, two calls for a reduction, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.transport.collective import CollectiveTransport
from retrograde.transport.collective.communicator import Communicator, Offer
from retrograde.transport.collective.courtesy import is_absent, spread_absence
from tests.harness import Ranks
from tests.meshes import mesh_of
from tests.multiproc.replicas import DIFFERENT, REPLICAS, TIMEOUT, WORLD, MeshTwin
from tests.patterns.cells import LIMIT
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.reference import same
from tests.small import BLOCKS, backward_that_raises, batch, build, loss_of
from tests.stages import EACH_STAGE, REDUCING_STAGES
from tests.transport.delays import delayed
from tests.transport.strays import STEPS, STRAY_AT, STRAYS, Counted, counting, counts_of

UNITS = BLOCKS + 1  # and the root

ByCollectives = functools.partial(MeshTwin, transport="collective")


# ---- exact
def _training(rank: int, world: int, stage: int, options: dict[str, Any], delay: bool) -> str:
    """Several backwards, a window, steps."""
    twin = MeshTwin(rank, world, stage, **options)
    twin.optimize()
    with delayed(rank, chance=0.2) if delay else contextlib.nullcontext():
        for step in range(3):
            twin.backwards_and_a_window(step)
            twin.check_grads()
            twin.step()
            twin.zero_grad()
    twin.check_weights()
    twin.compare_replicas()
    twin.close()
    return type(twin.engine.transport).__name__


@pytest.mark.parametrize("options", ({"transport": "collective"}, {"exact": False}), ids=("exact", "default sums"))
@EACH_STAGE
def test_training_is_exact(ranks: Ranks, stage: int, options: dict[str, Any]) -> None:
    """In the host's memory `exact=False` adds up as `exact=True` does."""
    assert ranks(WORLD).run(_training, stage, options, False) == ["CollectiveTransport"] * WORLD


@REDUCING_STAGES
def test_with_messages_that_take_their_time(ranks: Ranks, stage: int) -> None:
    ranks(WORLD).run(_training, stage, {"transport": "collective"}, True, timeout=LIMIT)


def _rounded(rank: int, world: int, precision: rg.Precision | None) -> list[str]:
    """Of a model in bf16: names of gradients that differ from those that came one by one."""
    found = []
    for transport in ("one-sided", "collective"):
        model = build().bfloat16()
        mesh = mesh_of(REPLICAS, world)
        engine = rg.shard(model, mesh=mesh, transport=transport, precision=precision, timeout=TIMEOUT)
        loss_of(model, batch(rank)).backward()
        found.append(engine.full_grads())
        dist.barrier()
    return [name for name in found[0] if not same(found[0][name], found[1][name])]


@pytest.mark.parametrize("precision", (None, rg.Precision(reduce="bf16"), rg.Precision(accumulate="fp32")))
def test_sums_are_rounded_as_one_by_one(ranks: Ranks, precision: rg.Precision | None) -> None:
    assert ranks(WORLD).run(_rounded, precision) == [[]] * WORLD


def _one_shard(rank: int, world: int, stage: int) -> None:
    """As many replicas as ranks."""
    twin = ByCollectives(rank, world, stage)
    twin.optimize()
    twin.train(0)
    twin.train(1)
    twin.check_weights()
    twin.close()


@REDUCING_STAGES
def test_replicas_of_one_rank(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_one_shard, stage)


# ---- rows of the matrix
ROWS = ("11f-replicated-mlp", "11f-replicated_unequal_backwards-mlp", "11f-replicated_changing_units-mlp")


@pytest.mark.parametrize("case_id", ROWS)
@EACH_STAGE
def test_rows(ranks: Ranks, case_id: str, stage: int) -> None:
    got = ranks(WORLD).run(play_rank, case_id, stage, timeout=LIMIT, transport="collective")
    want = expected(case_id, WORLD, stage)
    for rank in range(WORLD):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


# ---- counts
class Doors:
    """What goes through both doors of this rank meanwhile: calls of torch.distributed, by group, and messages."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def clear(self) -> None:
        self.calls.clear()
        self.messages.clear()

    def watched(self) -> Any:
        issue = Communicator.issue

        def issuing(communicator: Communicator, offer: Offer) -> list[dist.Work]:
            members = dist.get_process_group_ranks(communicator._own.group)
            self.calls[f"{type(offer).__name__} of {members}"] += 1
            return issue(communicator, offer)

        return mock.patch.multiple(Communicator, issue=issuing), counting(self.messages)


def _counted(rank: int, world: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """The last of some steps."""
    doors = Doors()
    model = build()
    rg.shard(model, stage, mesh=mesh_of(REPLICAS, world), transport="collective")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls, messages = doors.watched()
    with calls, messages:
        for step in range(4):
            dist.barrier()  # what a rank that is ahead says belongs to its own step
            doors.clear()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    return dict(doors.calls), dict(doors.messages)


@EACH_STAGE
def test_a_step_that_was_foreseen(ranks: Ranks, stage: int) -> None:
    """Gathers, two calls for each reduction, and the 2 (N - 1) messages of the step's agreement: nothing else."""
    again = UNITS - 1 if stage == 3 else 0
    for rank, (calls, messages) in enumerate(ranks(WORLD).run(_counted, stage)):
        replica = [0, 1] if rank < 2 else [2, 3]
        holders = [rank % 2, rank % 2 + 2]
        assert calls == {
            f"GatherOffer of {replica}": UNITS + again,
            f"ExchangeOffer of {replica}": UNITS,
            f"GatherOffer of {holders}": UNITS,
        }
        assert messages == {"Ordered": WORLD - 1 if rank == 0 else 1}


# ---- ranks that stray
def _with_a_stray(rank: int, world: int, stage: int, kind: str) -> list[Counted]:
    """Steps of which one has a stray; each is compared with plain torch. Returns the counts of each step."""
    doors = Doors()
    twin = ByCollectives(rank, world, stage)
    twin.optimize()
    found = []
    for step in range(STEPS):
        program = STRAYS[kind].once if step == STRAY_AT else STRAYS[kind].always
        dist.barrier()
        doors.clear()
        with doors.watched()[1]:
            program(twin.model, rank)
            twin.optimizers[1].step()
            dist.barrier()
        found.append(counts_of(doors.messages, world))
        twin.plain_play(program)
        twin.optimizers[0].step()
        twin.check()
        twin.zero_grad()
    twin.compare_replicas()
    twin.close()
    return found


@pytest.mark.parametrize("kind", STRAYS)
@EACH_STAGE
def test_a_stray_is_served_and_exact(ranks: Ranks, stage: int, kind: str) -> None:
    """Before the stray, and in the end, a step costs its agreement."""
    for rank, steps in enumerate(ranks(WORLD).run(_with_a_stray, stage, kind, timeout=LIMIT)):
        quiet = Counted(WORLD - 1 if rank == 0 else 1, 0, 0)
        assert (steps[STRAY_AT - 1], steps[-1]) == (quiet, quiet)


def _narrow(rank: int, world: int) -> None:
    """In bf16 what a sum makes of an absent part is another nan than what is absent."""
    twin = ByCollectives(rank, world, 3, make=lambda: build().bfloat16())
    for step in range(4):
        program = STRAYS["skips a unit"].once if step == 3 else STRAYS["skips a unit"].always
        program(twin.model, rank)
        twin.plain_play(program)
        twin.check_grads()
        twin.zero_grad()
    twin.close()


def test_a_stray_in_bf16(ranks: Ranks) -> None:
    ranks(WORLD).run(_narrow, timeout=LIMIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_of_absent_parts_there_is_no_sum(dtype: torch.dtype) -> None:
    absent = torch.empty(3, dtype=dtype)
    absent.view(torch.uint8).fill_(255)
    present, total = torch.ones(3, dtype=dtype), torch.full((3,), 2, dtype=dtype)
    spread_absence(torch.cat([present, present]), 2, total)
    assert torch.equal(total, present + present)
    spread_absence(torch.cat([present, absent]), 2, total)
    assert is_absent(total)


def _differing(rank: int, world: int, stage: int, name: str) -> None:
    ByCollectives(rank, world, stage).differ(name, steps=3)


@pytest.mark.parametrize("name", DIFFERENT)
@EACH_STAGE
def test_ranks_that_differ(ranks: Ranks, stage: int, name: str) -> None:
    ranks(WORLD).run(_differing, stage, name, timeout=LIMIT)


def _a_replica_is_idle(model: nn.Module, rank: int) -> None:
    if rank > 1:
        loss_of(model, batch(rank)).backward()


def _a_row_strays(model: nn.Module, rank: int) -> None:
    """All ranks of the second replica come to blocks in another order."""
    STRAYS["takes another order"].once(model, 1 if rank > 1 else 0)


def _late(rank: int, world: int, program: Callable[[nn.Module, int], None]) -> None:
    twin = ByCollectives(rank, world, 3)
    twin.optimize()
    for step in range(5):
        now = program if step == 3 else STRAYS["skips a unit"].always
        now(twin.model, rank)
        twin.plain_play(now)
        twin.step()
        twin.check()
        twin.zero_grad()
    twin.compare_replicas()
    twin.close()


@pytest.mark.parametrize("program", (_a_replica_is_idle, _a_row_strays))
def test_a_whole_replica_strays(ranks: Ranks, program: Callable[[nn.Module, int], None]) -> None:
    ranks(WORLD).run(_late, program, timeout=LIMIT)


# ---- what goes wrong
def _all_give_up(rank: int, world: int) -> int:
    """A backward that raises on all ranks, after calls were started; the next one is right."""
    twin = ByCollectives(rank, world, 3)
    with pytest.raises(ZeroDivisionError):
        backward_that_raises(twin.model, batch(rank))  # type: ignore[arg-type]
    twin.backward(1)
    twin.check_grads()
    twin.close()
    return twin.engine.buckets.used


def test_a_backward_that_all_gave_up(ranks: Ranks) -> None:
    assert ranks(WORLD).run(_all_give_up) == [0] * WORLD


# ---- which transport
def _chosen(rank: int, world: int) -> list[bool]:
    ways: list[dict[str, Any]] = [{}, {"exact": False}, {"transport": "collective"}]
    mesh = mesh_of(REPLICAS, world)
    return [isinstance(rg.shard(build(), mesh=mesh, **way).transport, CollectiveTransport) for way in ways]


def test_it_is_chosen_as_without_replicas(ranks: Ranks) -> None:
    assert ranks(WORLD).run(_chosen) == [[False, True, True]] * WORLD


def _one_after_the_other(rank: int, world: int) -> list[int]:
    """How many process groups were made for each of two engines; the first is gone when the second comes."""
    found = []
    mesh = mesh_of(REPLICAS, world)
    for number in range(2):
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
            model = build()
            rg.shard(model, mesh=mesh, timeout=23.0, transport="collective")  # groups of other time-outs are others
            loss_of(model, batch(rank, number)).backward()
            found.append(made.call_count)
        dist.barrier()  # a rank that drops its model takes its shards along
        del model
        gc.collect()
        dist.barrier()
    return found


def test_an_engine_takes_the_groups_of_one_that_is_gone(ranks: Ranks) -> None:
    """For two replicas and for the holders of two shards."""
    assert ranks(WORLD).run(_one_after_the_other) == [[4, 0]] * WORLD
