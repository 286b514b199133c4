"""Ranks as threads of one process: the same engine behind another door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.devices import Stream, streams_of
from retrograde.engine.shard import Options, shard_over
from retrograde.transport import Key, Position, Reason, Stamp, ThreadRanks, Use
from tests import threads
from tests.multiproc.twin import Twin
from tests.small import Small, batch, build, loss_of
from tests.stages import EACH_STAGE, WITH_OTHERS
from tests.transport.shards import Shards

STREAMS = streams_of(torch.device("cpu"))
HOST = Stream()


class ThreadTwin(Twin):
    """A model that is sharded over threads, beside a plain one."""

    def __init__(self, ranks: ThreadRanks, stage: int, make: Callable[[], nn.Module], **options: Any) -> None:
        self.ranks = ranks
        super().__init__(ranks.rank, ranks.world, stage, make, **options)

    def _shard(self, options: dict[str, Any]) -> rg.Engine:
        return shard_over(self.ranks, self.model, Options(stage=self.stage, timeout=20.0, **options))


def models(world: int) -> list[Iterator[Small]]:
    """Two for each rank, made before threads begin: random numbers are the process's."""
    return [iter([build(), build()]) for _ in range(world)]


@WITH_OTHERS
@EACH_STAGE
def test_training_is_exact(stage: int, world: int) -> None:
    made = models(world)

    def program(ranks: ThreadRanks) -> list[str]:
        twin = ThreadTwin(ranks, stage, made[ranks.rank].__next__)
        twin.optimize()
        for step in range(3):
            twin.backwards_and_a_window(step)
            twin.step()
            twin.zero_grad()
        twin.check_weights()
        return [entry.unit for entry in twin.engine.ledger.entries if entry.kind == "reduce"]

    reduced = threads.run(world, program)
    assert all(each == reduced[0] for each in reduced) and reduced[0]


@EACH_STAGE
def test_ranks_may_differ(stage: int) -> None:
    """Rank 1 does one backward more, and evaluates while rank 0 is at its step."""
    made = models(2)

    def program(ranks: ThreadRanks) -> None:
        twin = ThreadTwin(ranks, stage, made[ranks.rank].__next__)
        twin.optimize()

        def backwards(model: nn.Module, rank: int) -> None:
            for step in range(1 + rank):
                loss_of(model, batch(rank, step)).backward()

        backwards(twin.model, ranks.rank)
        twin.plain_play(backwards)
        if ranks.rank == 1:
            with torch.no_grad():
                twin.model(batch(1))
        twin.step()
        twin.check_weights()

    threads.run(2, program)


def test_edits_pass_fences() -> None:
    made = models(2)

    def program(ranks: ThreadRanks) -> bool:
        twin = ThreadTwin(ranks, 3, made[ranks.rank].__next__)
        for model in twin.both:
            with torch.no_grad():
                for _ in range(3):
                    for p in model.parameters():
                        p.mul_(0.5)
        twin.check_weights()
        return True

    assert threads.run(2, program) == [True, True]


def test_a_rank_that_fails_is_named() -> None:
    made = models(2)

    def program(ranks: ThreadRanks) -> str:
        model: nn.Module = next(made[ranks.rank])
        stage: Any = "three" if ranks.rank else 3
        with pytest.raises(rg.RetrogradeError) as caught:
            shard_over(ranks, model, Options(stage=stage, timeout=5.0))
        return str(caught.value)

    told, own = threads.run(2, program)
    assert "stage='three'" in own and told == f"rank 1: shard() raised ShardingError: {own}"


def test_a_rank_that_does_not_come_is_missed() -> None:
    def program(ranks: ThreadRanks) -> str:
        transport = ranks.transport(Shards(), STREAMS, 0.2)
        if ranks.rank:
            return ""
        with pytest.raises(rg.DivergenceError) as caught:
            transport.meet(Position(Reason.VALUE, "a value", {}, {}))
        return str(caught.value)

    assert threads.run(2, program)[0].startswith("rank 0 waited 0.2 s at a value over all ranks (a value)")


def test_reads_wait_for_the_state_they_need() -> None:
    """The owner's shard is not in that state yet; when it has changed, the reader is served."""

    class Late(Shards):
        there = False

        def shard_for(self, unit: int, stamp: Stamp) -> Tensor | str:
            return super().shard_for(unit, stamp) if self.there else "not yet"

    def program(ranks: ThreadRanks) -> list[float]:
        shards = Late(4)
        transport = ranks.transport(shards, STREAMS, 10.0)
        transport.meet(Position(Reason.VALUE, "both are here", {}, {}))
        into = torch.zeros(4)
        if ranks.rank == 0:
            work = transport.read(0, "a unit", Stamp(0, 0, 0), {1: into})
            assert into.tolist() == [0.0] * 4
            transport.meet(Position(Reason.VALUE, "it was asked for", {}, {}))
            work.wait(HOST)
        else:
            transport.meet(Position(Reason.VALUE, "it was asked for", {}, {}))
            shards.there = True
            transport.shards_changed()
        return into.tolist()

    assert threads.run(2, program)[0] == [1.0] * 4


def test_parts_are_copies_and_old_ones_are_forgotten() -> None:
    def program(ranks: ThreadRanks) -> list[float]:
        transport = ranks.transport(Shards(2), STREAMS, 10.0)
        old, new = Key(0, 0, 0, 2), Key(0, 1, 0, 2)
        mine = torch.full((2,), float(ranks.rank))
        transport.put(old, {1 - ranks.rank: [mine]}).wait(HOST)
        transport.put(new, {1 - ranks.rank: [mine]}).wait(HOST)
        mine.fill_(7.0)
        transport.meet(Position(Reason.STEP, "a step", {old: (Use.ACCUMULATED,)}, {}))
        transport.discard_parts()
        assert not transport.arrived(old, 1 - ranks.rank)
        return transport.take(new, 1 - ranks.rank, "a unit").tolist()

    assert threads.run(2, program) == [[1.0, 1.0], [0.0, 0.0]]
