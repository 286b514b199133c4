"""`coalesce(budget=...)`: bytes that wait, reductions, and results that are exactly the sum of their parts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from tests.harness import Ranks
from tests.live import live_bytes
from tests.reference import in_one_window, same
from tests.small import Raises, backwards, batch, build, loss_of
from tests.stages import EACH_STAGE, GRADIENT_STAGES, OPPOSITE_STAGES, WITH_OTHERS

BACKWARDS = 4


def _wrong(engine: rg.Engine, counts: dict[str, int], world: int) -> list[str]:
    """A unit that was reduced once has the sums of one window, another one those of each backward."""
    whole = in_one_window(build, world, backwards(*range(BACKWARDS)))
    each = [in_one_window(build, world, backwards(step)) for step in range(BACKWARDS)]
    got, wrong = engine.full_grads(), []
    for unit in engine.units:
        for slot in unit.layout.slots:
            parts = [whole] if counts[unit.name] == 1 else each
            want = torch.zeros(slot.shape)
            for part in parts:
                want = want + part[slot.name]
            if not same(got[slot.name], want):
                wrong.append(slot.name)
    return wrong


def _held(rank: int, world: int, stage: int, budget: int) -> dict[str, object]:
    """What waits after each backward, in live bytes, and what was reduced how often."""
    model = build()
    engine = rg.shard(model, stage)
    for _ in range(2):  # `.grad` is there, pages are too at stages 1 and 2
        with engine.coalesce(budget=0):
            loss_of(model, batch(rank)).backward()
    model.zero_grad(set_to_none=False)
    engine.pager.release()
    engine.buckets.trim()
    engine.pages.trim()
    dist.barrier()
    engine.ledger.clear()
    before, waiting = live_bytes(), []
    dist.barrier()
    with engine.coalesce(budget=budget):
        for step in range(BACKWARDS):
            loss_of(model, batch(rank, step)).backward()
            engine.pager.release()
            engine.buckets.trim()
            engine.pages.trim()
            dist.barrier()
            waiting.append(live_bytes() - before)
            dist.barrier()
    counts = {unit.name: engine.ledger.count("reduce", unit.name) for unit in engine.units}
    if stage == 1:
        engine.full_grads()
        counts = {unit.name: engine.ledger.count("reduce", unit.name) for unit in engine.units}
    wrong = _wrong(engine, counts, world)
    dist.barrier()
    sizes = {unit.name: unit.layout.page_bytes for unit in engine.units}
    return {"waiting": waiting, "counts": counts, "wrong": wrong, "sizes": sizes}


@EACH_STAGE
def test_what_waits_stays_within_the_budget(ranks: Ranks, stage: int) -> None:
    sizes = ranks(2).run(_held, stage, 0)[0]["sizes"]
    total = sum(sizes.values())
    for budget in (0, min(sizes.values()), total // 2, total - 1, total):
        for seen in ranks(2).run(_held, stage, budget):
            assert seen["wrong"] == []
            held = sum(sizes[name] for name, count in seen["counts"].items() if count == 1)
            assert seen["waiting"] == [held] * BACKWARDS and held <= budget
            assert set(seen["counts"].values()) <= {1, BACKWARDS}
            if budget in (0, total):
                assert set(seen["counts"].values()) == {BACKWARDS if budget == 0 else 1}


class Tiles(nn.Module):
    """Units whose gradients are whole numbers, so that a sum is exact however it is grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(nn.Linear(16, 2 + index) for index in range(6))


def _play(model: Tiles, plan: list[list[tuple[int, int]]], after: Callable[[int], None] = lambda _: None) -> None:
    for number, uses in enumerate(plan):
        loss = sum((model.tiles[i].weight * value).sum() + model.tiles[i].bias[0] * value for i, value in uses)
        loss.backward()
        after(number)


def _plan(seed: int, rank: int) -> list[list[tuple[int, int]]]:
    draw = random.Random(f"{seed}.{rank}")
    return [
        [(draw.randrange(6), draw.randint(-8, 8)) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(0, 6))
    ]


def _divergent(rank: int, world: int, stage: int, seed: int) -> tuple[list[str], bool]:
    model = Tiles()
    engine = rg.shard(model, stage, units=nn.Linear, reduce="sum")
    draw = random.Random(seed)
    sizes = [unit.layout.page_bytes for unit in engine.units]
    budget = draw.choice([0, max(sizes), sum(sizes) // 2, sum(sizes) // 3])
    fits = True

    def look(_: int) -> None:
        nonlocal fits
        fits = fits and sum(engine.pending.bytes_waiting.values()) <= budget

    with engine.coalesce(budget=budget):
        _play(model, _plan(seed, rank), look)
        with engine.no_sync():
            _play(model, _plan(seed + 1000, rank), look)
    got = engine.full_grads()

    def program(plain: Tiles, other: int) -> None:
        _play(plain, _plan(seed, other) + _plan(seed + 1000, other))

    want = in_one_window(Tiles, world, program, divisor=1)
    wrong = [name for name in got if not same(got[name], want[name])]
    dist.barrier()
    return wrong, fits


@GRADIENT_STAGES
@WITH_OTHERS
def test_ranks_that_diverge_in_a_budgeted_window(ranks: Ranks, stage: int, world: int) -> None:
    """Other units, other orders, other numbers of backwards on each rank; seeds are in the failing call."""
    for seed in range(20):
        for result in ranks(world).run(_divergent, stage, seed):
            assert result == ([], True), f"seed {seed}"


def _makes_room(rank: int, world: int, stage: int) -> tuple[dict[str, int], list[int], bool]:
    """Units that are used no more make room for others, in a backward that reduces nothing else."""
    model = Tiles()
    engine = rg.shard(model, stage, units=nn.Linear, reduce="sum")
    sizes = [unit.layout.page_bytes for unit in engine.units]
    held = []
    with engine.coalesce(budget=sum(sizes[:2])):
        for uses in [[(0, 1), (1, 1)]] * 3 + [[(2, 1)]] * 3:
            _play(model, [uses])
            held.append(sorted(engine.pending.bytes_waiting))
    counts = {unit.name: engine.ledger.count("reduce", unit.name) for unit in engine.units}
    got = engine.full_grads()
    exact = all(torch.equal(got[f"tiles.{i}.weight"], torch.full_like(got[f"tiles.{i}.weight"], 6.0)) for i in range(3))
    dist.barrier()
    return counts, held, exact


def test_cold_units_make_room(ranks: Ranks) -> None:
    for counts, held, exact in ranks(2).run(_makes_room, 3):
        assert exact
        # The third unit is reduced once before it is known to come again; then the others, both smaller, go for it.
        assert held == [[0, 1]] * 4 + [[2]] * 2
        assert [counts[f"tiles.{i}"] for i in range(6)] == [1, 1, 2, 0, 0, 0]


def _raises_after_making_room(rank: int, world: int, transport: str) -> tuple[list[int], list[float]]:
    """What had to make room in a backward that then raised came from good ones: it is not lost."""
    model = Tiles()
    engine = rg.shard(model, 2, units=nn.Linear, reduce="sum", transport=transport)
    sizes = [unit.layout.page_bytes for unit in engine.units]
    with engine.coalesce(budget=sum(sizes[:2])):
        _play(model, [[(0, 1), (1, 1)]] * 3 + [[(2, 1)]])
        with pytest.raises(ValueError, match="boom"):
            broken = Raises.apply(model.tiles[3].weight.sum(), ValueError("boom"))
            (broken + model.tiles[2].weight.sum()).backward()
        held = sorted(engine.pending.bytes_waiting)
    got = engine.full_grads()
    dist.barrier()
    return held, [got[f"tiles.{i}.weight"][0, 0].item() for i in range(3)]


@pytest.mark.parametrize("transport", ["one-sided", "collective"])
def test_a_backward_that_raises_loses_only_its_own(ranks: Ranks, transport: str) -> None:
    for held, values in ranks(2).run(_raises_after_making_room, transport):
        assert 0 not in held  # it did make room
        assert values[:2] == [6.0, 6.0] and values[2] in (2.0, 4.0)


def _bad(rank: int, world: int, budget: object) -> str:
    engine = rg.shard(build(), 2)
    try:
        with engine.coalesce(budget=budget):  # type: ignore[arg-type]
            raise AssertionError("accepted")
    except rg.ShardingError as error:
        return str(error)


@pytest.mark.parametrize("budget", (-1, "2 cups", [], float("nan"), True, "-3MiB"))
def test_bad_budgets_are_refused_by_name(ranks: Ranks, budget: object) -> None:
    (text,) = ranks(1).run(_bad, budget)
    assert "coalesce(budget)" in text and repr(budget) in text


def _entering(rank: int, world: int, stage: int) -> tuple[int, int, int]:
    model = build()
    engine = rg.shard(model, stage)
    with engine.no_sync():
        loss_of(model, batch(rank)).backward()
    before = sum(engine.pending.bytes_waiting.values())
    with engine.coalesce(budget="1KiB"):
        inside = sum(engine.pending.bytes_waiting.values())
    dist.barrier()
    return before, inside, engine.ledger.count("reduce")


@OPPOSITE_STAGES
def test_what_waits_already_is_reduced_when_it_exceeds_the_budget(ranks: Ranks, stage: int) -> None:
    for before, inside, reductions in ranks(2).run(_entering, stage):
        assert before > 1024 and inside == 0 and reductions == 5
