"""The watch over calls of collectives: what goes wrong in it is told."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

import retrograde as rg
from retrograde.transport.collective import CollectiveTransport
from tests.harness import Ranks
from tests.small import batch, build, loss_of

SOON = 20.0  # seconds: less than the engine's time-out


class _Unwatchable:
    """A call about which the device says nothing any more."""

    in_order = True

    def is_young(self, now: float) -> bool:
        return False

    def done(self) -> bool:
        raise RuntimeError("the device was lost")


def _waits_in_vain(rank: int, world: int) -> tuple[str, bool]:
    """Rank 0 has a call under way that raises when it is looked at, and wants others, to which rank 1 does not come."""
    model = build()
    engine = rg.shard(model, 3, transport="collective", timeout=3 * SOON)
    loss_of(model, batch(rank)).backward()
    dist.barrier()
    transport = engine.transport
    assert isinstance(transport, CollectiveTransport)
    start = time.monotonic()
    with pytest.raises(rg.DivergenceError) as caught:
        if rank == 0:
            transport._conductor._open[-1] = _Unwatchable()  # type: ignore[assignment]
            loss_of(model, batch(rank)).backward()
            engine.full_grads()
        while time.monotonic() - start < SOON:
            time.sleep(0.05)
            transport.check()
    in_time = time.monotonic() - start < SOON
    dist.barrier()
    return str(caught.value), in_time


def test_an_error_in_the_watch_is_told_to_all_ranks(ranks: Ranks) -> None:
    for said, in_time in ranks(2).run(_waits_in_vain, timeout=100.0):
        assert "rank 0's watch over calls (RuntimeError)" in said and "the device was lost" in said
        assert in_time
