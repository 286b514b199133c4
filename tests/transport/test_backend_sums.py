"""`exact=False`: the backend's reduce-scatter starts while backward goes on, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from retrograde.gradients.strategy import BackendSum
from tests.harness import RankPool
from tests.reference import play
from tests.small import BLOCKS, Small, backward_that_raises, backwards, batch, build, loss_of
from tests.stages import REDUCING_STAGES, WITH_OTHERS
from tests.transport.delays import delayed

Ranks = Callable[[int], RankPool]


@contextmanager
def watched(engine: rg.Engine) -> Iterator[list[str]]:
    """What happens in a backward, in order: a unit's gradient is there, its reduction starts, ranks meet."""
    seen: list[str] = []
    collect, start, meet = engine.flow.collect, BackendSum._start, engine.transport.meet

    def collected(unit: Any, *rest: Any) -> Any:
        seen.append(f"has {unit.name}")
        return collect(unit, *rest)

    def started(self: BackendSum, key: Any) -> None:
        seen.append(f"starts {engine.units[key.unit].name}")
        start(self, key)

    def met(*position: Any) -> Any:
        seen.append("meets")
        return meet(*position)

    engine.flow.collect, BackendSum._start = collected, started  # type: ignore[method-assign]
    engine.transport.meet = met  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        BackendSum._start = start  # type: ignore[method-assign]
        del engine.flow.collect, engine.transport.meet


def _early(rank: int, world: int, stage: int) -> list[str]:
    model = build()
    engine = rg.shard(model, stage, exact=False)
    loss = loss_of(model, batch(rank))
    for block in model.blocks:
        block.register_full_backward_hook(lambda *args: dist.barrier())  # so that all have said that they are ready
    loss = loss_of(model, batch(rank))
    with watched(engine) as seen:
        loss.backward()
    return seen


@REDUCING_STAGES
@WITH_OTHERS
def test_reductions_start_during_backward(ranks: Ranks, stage: int, world: int) -> None:
    for seen in ranks(world).run(_early, stage):
        first_meeting = seen.index("meets")
        started = [what for what in seen[:first_meeting] if what.startswith("starts")]
        # All but the last block's as a rule; how soon a rank hears that all are ready is up to threads.
        assert started
        assert [what for what in seen if what.startswith("has")][-1] == "has (root)"
        assert sorted(what for what in seen if what.startswith("starts")) == sorted(
            f"starts {name}" for name in ("(root)", *(f"blocks.{i}" for i in range(BLOCKS)))
        )


def _off(model: Small, engine: rg.Engine, want: Small) -> list[str]:
    """Parameters whose gradients are not those of the plain model, but for the rounding of another order of sums."""
    grads = engine.full_grads()
    wrong = []
    for name, p in want.named_parameters():
        grad = grads[name]
        scale = 1.0 if p.grad is None else float(p.grad.abs().max())
        if grad is None or p.grad is None or not torch.allclose(grad, p.grad, rtol=1e-5, atol=1e-6 * scale):
            wrong.append(name)
    return wrong


def _orders(rank: int, world: int, seed: int) -> list[str]:
    """Ranks use blocks in orders of their own, with messages that take their time and collectives of the user's."""
    with delayed(10 * seed + rank):
        plain, model = build(), build()
        engine = rg.shard(model, 3, exact=False, timeout=30.0)

        def program(each: Small, who: int) -> None:
            for step in range(2):
                hidden = each.embed(batch(who, step))
                for block in each.blocks if who == 0 else reversed(each.blocks):
                    hidden = block(hidden)
                each.head(hidden).square().mean().backward()

        program(model, rank)
        dist.all_reduce(torch.ones(3))  # between ours, at another moment on each rank
        play(plain, world, program, 3)
        wrong = _off(model, engine, plain)
        dist.barrier()
    return wrong


@pytest.mark.parametrize("seed", range(2))
def test_ranks_with_orders_of_their_own(ranks: Ranks, seed: int) -> None:
    assert ranks(4).run(_orders, seed, timeout=90.0) == [[]] * 4


def _all_give_up(rank: int, world: int) -> list[str]:
    """A backward that raises on all ranks, after reductions were agreed on; the next one is right."""
    plain, model = build(), build()
    engine = rg.shard(model, 3, exact=False, timeout=20.0)
    with pytest.raises(ZeroDivisionError):
        backward_that_raises(model, batch(rank))
    backwards(1)(model, rank)
    play(plain, world, backwards(1), 3)
    wrong = _off(model, engine, plain)
    if engine.buckets.used:
        wrong.append(f"{engine.buckets.used} bytes of buckets")
    return wrong


def test_a_backward_that_all_gave_up(ranks: Ranks) -> None:
    assert ranks(2).run(_all_give_up) == [[], []]


def _one_gives_up(rank: int, world: int) -> str:
    model = build()
    rg.shard(model, 3, exact=False, timeout=20.0)
    for block in model.blocks:
        block.register_full_backward_hook(lambda *args: dist.barrier())
    try:
        backward_that_raises(model, batch(rank), raises=rank == 1)
        model.zero_grad()
    except ZeroDivisionError:
        with pytest.raises(rg.DivergenceError) as caught:
            model.zero_grad()
        return str(caught.value)
    except rg.DivergenceError as error:
        return str(error)
    return ""


def test_a_backward_that_one_gave_up_is_told(ranks: Ranks) -> None:
    """Its reductions were started with what it had sent, so the others cannot leave it out."""
    for said in ranks(2).run(_one_gives_up):
        assert "rank 1 gave up a backward in which it had already sent its gradient of unit" in said


def _more_groups(rank: int, world: int) -> bool:
    """Rank 0 is in one process group more than the others, by which torch names groups."""
    extra = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    model = build()
    engine = rg.shard(model, 3, exact=False, timeout=20.0)
    loss_of(model, batch(rank)).backward()
    found = engine.full_grad("head.bias") is not None
    dist.barrier()
    if extra is not None:
        dist.destroy_process_group(extra)
    return found


def test_ranks_may_be_in_other_groups(ranks: Ranks) -> None:
    assert ranks(2).run(_more_groups) == [True, True]
