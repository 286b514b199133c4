"""Memory as arithmetic: what a step holds, in bytes of live storages, phase by phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from tests.harness import Ranks
from tests.live import live_storages
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE, EACH_WORLD, WITH_OTHERS


def _resident(engine: rg.Engine) -> int:
    """Bytes of pages that are really in memory (not what the ledger says)."""
    pages = [unit.page for unit in engine.units if unit.page.storage is not None and not unit.stays]
    return sum(page.memory.untyped_storage().nbytes() for page in pages)


def _pages_during_a_step(rank: int, world: int, prefetch: bool) -> dict[str, int]:
    model = build()
    engine = rg.shard(model, 3, prefetch=prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most, count = 0, 0

    def look(*_: object) -> None:
        nonlocal most, count
        most = max(most, _resident(engine))
        count = max(count, sum(unit.page.storage is not None for unit in engine.units))

    for module in model.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for step in range(3):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes = sorted((u.layout.page_bytes for u in engine.units), reverse=True)
    return {
        "most": most,
        "pages": count,
        "after": _resident(engine),
        "ledger": engine.ledger.peak,
        "largest": sizes[0],
        "two": sum(sizes[:2]),
    }


@WITH_OTHERS
def test_two_pages_with_prefetch_one_without(ranks: Ranks, world: int) -> None:
    for seen in ranks(world).run(_pages_during_a_step, True):
        assert seen["pages"] == 2 and seen["most"] <= seen["two"] and seen["after"] == 0
        assert seen["ledger"] <= seen["two"]
    for seen in ranks(world).run(_pages_during_a_step, False):
        assert seen["pages"] == 1 and seen["most"] == seen["largest"] and seen["after"] == 0
        assert seen["ledger"] == seen["largest"]


def _what_stays(rank: int, world: int, stage: int, adam: bool) -> dict[str, int]:
    dist.barrier()
    before = sum(live_storages().values())
    model = build()
    engine = rg.shard(model, stage)
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.1)
    held = []
    for step in range(4):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        dist.barrier()
        held.append(sum(live_storages().values()) - before)
        dist.barrier()
        optimizer.zero_grad()
    dist.barrier()
    bare = sum(live_storages().values()) - before
    dist.barrier()
    layouts = [u.layout for u in engine.units]
    slots = sum(len(layout.slots) for layout in layouts)
    return {
        "held": held[-1],
        "growth": held[-1] - held[1],
        "bare": bare,
        "shards": sum(layout.shard_bytes for layout in layouts),
        "state": sum(leaf.local.numel() * 4 for leaf in model.parameters()),  # the pieces, without padding
        "pages": sum(layout.page_bytes for layout in layouts),
        # Every parameter has a one-element stub behind its full tensor, and Adam a step count.
        "stubs": 4 * 2 * slots,
        "counts": 4 * slots if adam else 0,
    }


@EACH_WORLD
@EACH_STAGE
@pytest.mark.parametrize("adam", (False, True))
def test_between_steps_only_shards_gradients_and_state(ranks: Ranks, stage: int, world: int, adam: bool) -> None:
    for seen in ranks(world).run(_what_stays, stage, adam):
        weights = seen["shards"] if stage == 3 else seen["pages"]  # stages 1 and 2: the shard lies in the page
        state = (2 * seen["state"] if adam else 0) + seen["counts"]
        assert seen["growth"] == 0
        assert 0 <= seen["held"] - (weights + seen["shards"] + state) <= seen["stubs"]
        assert 0 <= seen["bare"] - (weights + state) <= seen["stubs"]


def _graph_without_pages(rank: int, world: int, stage: int) -> tuple[int, int]:
    """What a forward leaves for backward, beside pages: the same bytes as on plain torch."""

    def kept(model: torch.nn.Module, release: Callable[[], None]) -> int:
        loss = loss_of(model, batch(rank))
        release()
        after = live_storages()
        del loss
        left = live_storages()
        return sum(n for place, n in after.items() if place not in left)

    plain = build()
    unsharded = kept(plain, lambda: None)
    model = build()
    engine = rg.shard(model, stage)
    dist.barrier()
    sharded = kept(model, lambda: (dist.barrier(), engine.pager.release()))
    dist.barrier()
    return sharded, unsharded


def test_a_graph_holds_no_pages(ranks: Ranks) -> None:
    for sharded, _ in ranks(2).run(_graph_without_pages, 3):
        # Activations only are Python objects under our hooks; on plain torch they are invisible to Python.
        assert sharded > 0
    for held in ranks(2).run(_held_by_user):
        assert held == (True, True, False)


def _held_by_user(rank: int, world: int) -> tuple[bool, bool, bool]:
    """A page lives while somebody refers to it, and its values stay what they were."""
    model = build()
    engine = rg.shard(model, 3, prefetch=False)
    weight = model.blocks[0].up.weight
    copy = weight.detach().clone()
    with torch.no_grad():
        model(batch(rank))
    unit = engine.units[1]
    alive, same = unit.page.storage is not None, torch.equal(weight, copy)
    del weight
    with torch.no_grad():
        model(batch(rank))
    return alive, same, unit.page.storage is not None


def _kept_while_it_came(rank: int, world: int) -> bool:
    """A page under way that is to be dropped, and that somebody holds: it stays, and is known to be a page."""
    engine = rg.shard(build(), 3)
    unit = engine.units[1]
    engine.pager._load(unit)
    held = unit.page.full_tensors[0]
    engine.pager.retire(unit)
    known = unit.page.ready and engine.pager.unit_of(held.untyped_storage()._cdata) is unit
    dist.barrier()
    return known


def test_a_page_that_could_not_be_dropped_is_known(ranks: Ranks) -> None:
    assert ranks(2).run(_kept_while_it_came) == [True, True]


def _failed_steps(rank: int, world: int, stage: int) -> list[int]:
    model = build()
    engine = rg.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def boom(*_: object) -> None:
        raise ValueError("boom")

    held = []
    for step in range(5):
        handle = model.blocks[1].register_full_backward_hook(boom)
        with pytest.raises(ValueError, match="boom"):
            loss_of(model, batch(rank, step)).backward()
        handle.remove()
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        held.append(sum(live_storages().values()) + _resident(engine))
        dist.barrier()
    return held


@EACH_STAGE
def test_a_failed_step_leaves_nothing(ranks: Ranks, stage: int) -> None:
    for held in ranks(2).run(_failed_steps, stage):
        assert max(held[2:]) <= held[1]
