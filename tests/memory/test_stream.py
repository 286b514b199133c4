"""`engine.iter_full_params(budget)`: pages come once each, and never take more than the budget."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from tests.harness import Ranks
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE


def _streamed(rank: int, world: int, stage: int) -> None:
    model = build()
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine = rg.shard(model, stage)
    pages = [unit.layout.page_bytes for unit in engine.units]
    enough = sum(sorted(pages)[-2:])
    for trained in (False, True):
        if trained:
            loss_of(model, batch(rank)).backward()  # which unit follows which is known from now on
        engine.pager.release()
        engine.ledger.clear()
        before = engine.ledger.resident
        seen = []
        for name, tensor in engine.iter_full_params(enough):
            assert torch.equal(tensor, wanted[name])
            seen.append(name)
        assert sorted(seen) == sorted(wanted)
        assert tensor.numel() == 0  # it was valid until the next was asked for
        assert engine.ledger.peak - before <= enough
        assert engine.ledger.resident == before
        once = 0 if trained and stage < 3 else 1  # pages that stay are here already
        gathers = [engine.ledger.count("gather", unit.name) for unit in engine.units]
        assert gathers == [once] * len(pages)
    dist.barrier()


@EACH_STAGE
def test_within_the_budget(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_streamed, stage)


def _too_little(rank: int, world: int) -> None:
    engine = rg.shard(build(), 3)
    largest = max(unit.layout.page_bytes for unit in engine.units)
    with pytest.raises(rg.ShardingError, match=r"budget=\d+: unit .* needs \d+ bytes, and the page that is read ahead"):
        list(engine.iter_full_params(largest))
    alone = rg.shard(build(), 3, prefetch=False)
    assert sum(1 for _ in alone.iter_full_params(largest)) == 27
    assert alone.ledger.peak <= largest
    dist.barrier()


def test_too_little(ranks: Ranks) -> None:
    ranks(2).run(_too_little)
