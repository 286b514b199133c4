"""`exact=False` in the host's memory: sums by collectives, which start while backward goes on, with the same bits.

On a device the backend adds up: tests/accelerator."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from retrograde.transport.collective import CollectiveTransport
from retrograde.transport.collective.communicator import Communicator, ExchangeOffer, Offer
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.small import BLOCKS, Small, backward_that_raises, backwards, batch, build, loss_of
from tests.stages import REDUCING_STAGES, WITH_OTHERS
from tests.transport.delays import delayed


def _watched(rank: int, world: int, stage: int) -> list[str]:
    """What happens in a backward, in order: a unit's gradient is there, a call starts, ranks meet."""
    model = build()
    engine = rg.shard(model, stage, exact=False)
    seen: list[str] = []
    collect, start, meet = engine.flow.collect, Communicator.start, CollectiveTransport.meet

    def collected(unit: Any, *rest: Any) -> Any:
        seen.append(f"has {unit.name}")
        return collect(unit, *rest)

    def started(self: Communicator, offer: Offer) -> Any:
        if isinstance(offer, ExchangeOffer):
            seen.append("starts")
        return start(self, offer)

    def met(self: CollectiveTransport, *position: Any) -> Any:
        seen.append("meets")
        return meet(self, *position)

    loss = loss_of(model, batch(rank))
    with (
        mock.patch.object(engine.flow, "collect", collected),
        mock.patch.object(Communicator, "start", started),
        mock.patch.object(CollectiveTransport, "meet", met),
    ):
        loss.backward()
    dist.barrier()
    return seen


@REDUCING_STAGES
@WITH_OTHERS
def test_calls_start_during_backward(ranks: Ranks, stage: int, world: int) -> None:
    for seen in ranks(world).run(_watched, stage):
        assert seen.count("starts") == BLOCKS + 1
        assert seen.index("starts") < seen.index("has (root)")
        assert "meets" not in seen


def _orders(rank: int, world: int, seed: int) -> None:
    """Ranks use blocks in orders of their own, with messages that take their time and collectives of the user's."""
    with delayed(10 * seed + rank):
        twin = Twin(rank, world, 3, exact=False, timeout=30.0)

        def program(model: Small, who: int) -> None:
            for step in range(2):
                hidden = model.embed(batch(who, step))
                for block in model.blocks if who == 0 else reversed(model.blocks):
                    hidden = block(hidden)
                model.head(hidden).square().mean().backward()

        program(twin.model, rank)  # type: ignore[arg-type]
        dist.all_reduce(torch.ones(3))  # between ours, at another moment on each rank
        twin.plain_play(program)  # type: ignore[arg-type]
        twin.check_grads()
        twin.close()


@pytest.mark.parametrize("seed", range(2))
def test_ranks_with_orders_of_their_own(ranks: Ranks, seed: int) -> None:
    ranks(4).run(_orders, seed, timeout=90.0)


def _all_give_up(rank: int, world: int) -> int:
    """A backward that raises on all ranks, after calls were started; the next one is right."""
    twin = Twin(rank, world, 3, exact=False, timeout=20.0)
    with pytest.raises(ZeroDivisionError):
        backward_that_raises(twin.model, batch(rank))  # type: ignore[arg-type]
    backwards(1)(twin.model, rank)
    twin.plain_play(backwards(1))
    twin.check_grads()
    twin.close()
    return twin.engine.buckets.used


def test_a_backward_that_all_gave_up(ranks: Ranks) -> None:
    assert ranks(2).run(_all_give_up) == [0, 0]


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


# ---- which transport
def _chosen(rank: int, world: int) -> list[bool]:
    """Does `exact` choose collectives, where no transport is given?"""
    return [isinstance(rg.shard(build(), exact=exact).transport, CollectiveTransport) for exact in (None, True, False)]


def test_it_chooses_collectives(ranks: Ranks) -> None:
    assert ranks(2).run(_chosen) == [[False, False, True]] * 2


def _one_sided(rank: int, world: int) -> str:
    with pytest.raises(rg.ShardingError) as caught:
        rg.shard(build(), exact=False, transport="one-sided", timeout=20.0)
    return str(caught.value)


def test_another_transport_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_one_sided):
        assert "exact=False with transport='one-sided' cannot be used" in text
        assert "give exact=True, or transport='collective'" in text
