"""A rank of a world that is imagined: what it counts is what the ranks of that world would count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import retrograde as rg
from retrograde.engine.shard import Options, shard_over
from retrograde.transport import FakeRanks, Memory
from tests.harness import RankPool
from tests.small import BLOCKS, batch, build, loss_of
from tests.stages import EACH_STAGE

Counts = dict[str, tuple[int, int]]  # calls and bytes


def _step(engine: rg.Engine, rank: int) -> Counts:
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    engine.ledger.clear()
    loss_of(engine.model, batch(rank)).backward()
    optimizer.step()
    ledger = engine.ledger
    return {kind: (ledger.count(kind), ledger.bytes(kind)) for kind in ("gather", "drop", "reduce", "join", "agree")}


def _real(rank: int, world: int, stage: int) -> Counts:
    return _step(rg.shard(build(), stage), rank)


@EACH_STAGE
def test_it_counts_as_ranks_do(ranks: Callable[[int], RankPool], stage: int) -> None:
    """Of a step in which all ranks do the same."""
    real = ranks(2).run(_real, stage)
    for rank in range(2):
        fake = shard_over(FakeRanks(world=2, rank=rank), build(), Options(stage=stage))
        assert _step(fake, rank) == real[rank]


@pytest.mark.parametrize("world", (1, 3, 64, 1000))
def test_any_world(world: int) -> None:
    """Bytes follow from the sizes of units alone."""
    ranks = FakeRanks(world, rank=world - 1)
    engine = shard_over(ranks, build(), Options(stage=3))
    _step(engine, 0)
    moved = sum(unit.layout.page_bytes - unit.layout.shard_bytes for unit in engine.units)
    assert len(engine.units) == BLOCKS + 1
    assert engine.ledger.bytes("reduce") == moved
    (transport,) = ranks.transports
    assert transport.nbytes["put"] == moved
    assert transport.calls["put"] == BLOCKS + 1
    shards = sum(unit.layout.shard_bytes for unit in engine.units)
    assert transport.allocated[Memory.SHARD] == shards
    assert transport.nbytes["read"] >= moved


def test_all_memory_comes_from_the_transport() -> None:
    """Shards, pages and buckets may have to lie in a place of the transport's choosing."""
    ranks = FakeRanks(world=2)
    engine = shard_over(ranks, build(), Options(stage=3))
    _step(engine, 0)
    allocated = ranks.transports[0].allocated
    assert all(allocated[memory] > 0 for memory in Memory)
    assert engine.ledger.peak <= allocated[Memory.PAGE]


@pytest.mark.parametrize("options", ({"exact": False}, {"transport": "collective"}))
def test_collectives_are_between_processes(options: dict[str, Any]) -> None:
    """Refused by name, not served in another way."""
    with pytest.raises(rg.ShardingError, match="cannot be used over FakeRanks: collectives are between processes"):
        shard_over(FakeRanks(world=2), build(), Options(**options))
