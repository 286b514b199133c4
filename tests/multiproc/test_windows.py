"""Windows: what `no_sync()` and `coalesce()` mean, against accumulating locally on each rank and reducing once."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from tests.harness import RankPool, Ranks
from tests.reference import Grads, Program, add_grad, in_one_window, same
from tests.small import BLOCKS, Small, Tiled, backwards, batch, build, loss_of
from tests.stages import EACH_STAGE

BODIES: dict[str, Program] = {}


def body(fn: Program) -> Program:
    BODIES[fn.__name__] = fn
    return fn


@body
def four_backwards(model: Small, rank: int) -> None:
    for step in range(4):
        loss_of(model, batch(rank, step)).backward()


@body
def forwards_first(model: Small, rank: int) -> None:
    losses = [loss_of(model, batch(rank, step)) for step in range(3)]
    for loss in reversed(losses):
        loss.backward()


@body
def kept_graph(model: Small, rank: int) -> None:
    out = model(batch(rank))
    out.square().mean().backward(retain_graph=True)
    loss_of(model, batch(rank, 1)).backward()
    out.abs().sum().backward()


@body
def grad_cache(model: Small, rank: int) -> None:
    chunks = [batch(rank, step) for step in range(3)]
    with torch.no_grad():
        found = torch.cat([model(ids).mean(1) for ids in chunks]).requires_grad_()
    (found @ found.T).logsumexp(1).sum().backward()
    for ids, grad in zip(chunks, found.grad.split(2), strict=True):
        model(ids).mean(1).backward(grad)


@body
def inner_backward(model: Small, rank: int) -> None:
    for step in range(2):
        x = model.embed(batch(rank, step))
        for block in model.blocks:
            x = block(x)
        Tiled.apply(x, model.head).backward()


@body
def checkpointed(model: Small, rank: int) -> None:
    for reentrant in (False, True):
        x = model.embed(batch(rank))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        model.head(x).square().mean().backward()


@body
def frozen_and_unused(model: Small, rank: int) -> None:
    dict(model.named_parameters())["blocks.0.up.weight"].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    for step in range(2):
        x = model.embed(batch(rank, step))
        for block in (model.blocks[0], model.blocks[2]):
            x = block(x)
        x.square().mean().backward()  # neither the head nor two of the blocks


@body
def ranks_see_different_units(model: Small, rank: int) -> None:
    order = [(0, 1), (3, 0), (2, 3)][rank % 3]
    for step in range(2 + rank % 2):
        x = model.embed(batch(rank, step))
        for index in order if step % 2 else order[::-1]:
            x = model.blocks[index](x)
        x.square().mean().backward()


@body
def zeroed_in_the_middle(model: Small, rank: int) -> None:
    out = model(batch(rank))
    out.square().mean().backward(retain_graph=True)
    model.zero_grad()
    out.abs().sum().backward()


def _reference(name: str, world: int) -> Grads:
    return in_one_window(build, world, BODIES[name])


def _differences(engine: rg.Engine, want: Grads) -> list[str]:
    got = engine.full_grads()
    return [name for name in want if not same(got[name], want[name])]


def _in_a_window(rank: int, world: int, stage: int, name: str) -> tuple[list[str], set[int]]:
    model = build()
    engine = rg.shard(model, stage)
    with engine.coalesce():
        BODIES[name](model, rank)
    wrong = _differences(engine, _reference(name, world))
    counts = Counter({u.name: engine.ledger.count("reduce", u.name) for u in engine.units})
    dist.barrier()
    return wrong, set(counts.values())


@EACH_STAGE
@pytest.mark.parametrize("name", BODIES)
def test_a_window_is_local_accumulation_and_one_reduction(ranks: Ranks, stage: int, name: str) -> None:
    for wrong, counts in ranks(2).run(_in_a_window, stage, name):
        assert wrong == []
        # `zero_grad()` reads what it then drops, which ends the first part of the window.
        assert max(counts) == (2 if name == "zeroed_in_the_middle" else 1)


def _in_groups(rank: int, world: int) -> dict[tuple[int, str], list[str]]:
    """All sizes of group in one pool: starting ranks is what costs."""
    wrong: dict[tuple[int, str], list[str]] = {}
    for size in range(world, 0, -1):  # torch names a group by how many its ranks have: larger groups first
        group = dist.new_group(list(range(size)))
        if rank < size:
            for name in ("four_backwards", "ranks_see_different_units"):
                model = build()
                engine = rg.shard(model, 3, process_group=group)
                with engine.coalesce():
                    BODIES[name](model, rank)
                wrong[size, name] = _differences(engine, _reference(name, size))
        dist.barrier()
    return wrong


def test_exact_at_every_world() -> None:
    with contextlib.closing(RankPool(8)) as pool:
        results = pool.run(_in_groups, timeout=100)
    assert {size for size, _ in results[0]} == set(range(1, 9))
    assert [sizes for sizes in results if any(sizes.values())] == []


def _counts(rank: int, world: int, stage: int, backwards: int, kind: str) -> set[int]:
    model = build()
    engine = rg.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with {"coalesce": engine.coalesce, "no_sync": engine.no_sync, "none": contextlib.nullcontext}[kind]():
        for step in range(backwards):
            loss_of(model, batch(rank, step)).backward()
    optimizer.step()
    return {engine.ledger.count("reduce", unit.name) for unit in engine.units}


@pytest.mark.parametrize("backwards", (1, 2, 4, 8, 16))
@EACH_STAGE
def test_reductions_do_not_grow_with_the_backwards_in_a_window(ranks: Ranks, stage: int, backwards: int) -> None:
    for kind in ("coalesce", "no_sync"):
        assert all(counts == {1} for counts in ranks(2).run(_counts, stage, backwards, kind))
    without = 1 if stage == 1 else backwards
    assert all(counts == {without} for counts in ranks(2).run(_counts, stage, backwards, "none"))


def _several(rank: int, world: int, stage: int) -> tuple[list[str], set[int]]:
    """Two windows and a backward of its own before one step; the second window has others inside."""
    model = build()
    engine = rg.shard(model, stage)
    with engine.coalesce():
        four_backwards(model, rank)
    loss_of(model, batch(rank, 7)).backward()
    with engine.coalesce():
        kept_graph(model, rank)
        with engine.no_sync():
            loss_of(model, batch(rank, 5)).backward()
        with engine.coalesce():
            loss_of(model, batch(rank, 6)).backward()
    groups = [[four_backwards], [backwards(7)], [kept_graph, backwards(5, 6)]]
    if stage == 1:
        groups = [[program for group in groups for program in group]]
    plain = build()
    for group in groups:
        of_group = in_one_window(build, world, _one_after_the_other(group))
        for name, param in plain.named_parameters():
            add_grad(param, of_group[name])
    wrong = _differences(engine, {name: param.grad for name, param in plain.named_parameters()})
    counts = {engine.ledger.count("reduce", unit.name) for unit in engine.units}
    dist.barrier()
    return wrong, counts


def _one_after_the_other(programs: list[Program]) -> Program:
    def program(model: nn.Module, rank: int) -> None:
        for each in programs:
            each(model, rank)

    return program


@EACH_STAGE
def test_several_windows_in_a_step_and_windows_in_windows(ranks: Ranks, stage: int) -> None:
    for wrong, counts in ranks(2).run(_several, stage):
        assert wrong == [] and counts == {1 if stage == 1 else 3}


def _raises_inside(rank: int, world: int, stage: int, kind: str) -> tuple[list[str], int, list[str]]:
    """The rule: what was kept stays, as `.grad` would; `zero_grad()` drops it."""
    model = build()
    engine = rg.shard(model, stage)
    window = engine.no_sync if kind == "no_sync" else engine.coalesce
    with pytest.raises(ValueError, match="boom"), window():
        four_backwards(model, rank)
        raise ValueError("boom")
    before = engine.ledger.count("reduce")
    kept = _differences(engine, _reference("four_backwards", world))
    model.zero_grad()
    with pytest.raises(ValueError, match="boom"), window():
        four_backwards(model, rank)
        raise ValueError("boom")
    model.zero_grad()
    with engine.coalesce():
        kept_graph(model, rank)
    dropped = _differences(engine, _reference("kept_graph", world))
    dist.barrier()
    return kept, before, dropped


@EACH_STAGE
@pytest.mark.parametrize("kind", ("no_sync", "coalesce"))
def test_an_exception_keeps_what_was_pending(ranks: Ranks, stage: int, kind: str) -> None:
    for kept, reductions, dropped in ranks(2).run(_raises_inside, stage, kind):
        assert kept == [] and reductions == 0 and dropped == []


def _read_inside(rank: int, world: int, stage: int) -> tuple[bool, list[str]]:
    """Reading `p.grad` in a window reduces what is there, so it shows what torch would, at any moment."""
    model = build()
    engine = rg.shard(model, stage)
    first = in_one_window(build, world, backwards(0))
    second = in_one_window(build, world, backwards(1))
    with engine.coalesce():
        loss_of(model, batch(rank, 0)).backward()
        inside = engine.full_grads()
        shown = all(same(inside[name], first[name]) for name in first)
        loss_of(model, batch(rank, 1)).backward()
    wrong = _differences(engine, {name: first[name] + second[name] for name in first})
    dist.barrier()
    return shown, wrong


@EACH_STAGE
def test_reading_a_gradient_inside_a_window_shows_it(ranks: Ranks, stage: int) -> None:
    assert all(result == (True, []) for result in ranks(2).run(_read_inside, stage))


def _cost(rank: int, world: int) -> tuple[str, int]:
    model = nn.ModuleList([nn.Linear(1024, 1023, dtype=torch.bfloat16), nn.Linear(64, 64).requires_grad_(False)])
    engine = rg.shard(model, 3)
    return engine.explain(), sum(u.layout.page_bytes for u in engine.units if any(u.trained))


def test_explain_tells_what_a_window_costs(ranks: Ranks) -> None:
    for text, cost in ranks(2).run(_cost):
        assert cost == 2 * 1025 * 1023 + 2  # padded to two ranks
        assert "holds up to 2.0 MiB of unreduced gradients per rank" in text
        assert "coalesce(budget=...)" in text
        assert "(root)[bfloat16@cpu]" in text and "(root)[float32@cpu]" in text


assert BLOCKS == 4  # ranks_see_different_units picks from four
