"""One unit's gradient on its way: every rank's part goes to its owner, who adds them in rank order.

[Note: exactness]
The sum is ((g0 + g1) + g2) + ... in rank order, in fp32 or wider whatever travelled, then one division by the
world size for `reduce="mean"`. It does not depend on which parts arrived first, so it is the same at every run
and equal to playing the ranks one after the other in one process. A rank without a gradient is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from retrograde.comm import Key, Station
from retrograde.layout import Policy
from retrograde.ledger import Kind, Ledger
from retrograde.residency import BufferPool, Unit


class Use(IntEnum):
    """What a backward does with a parameter's gradient on one rank."""

    NONE = 0
    CAPTURED = 1  # torch.autograd.grad returns it
    ACCUMULATED = 2  # it goes to .grad


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says at a meeting about a gradient it has put, or will put."""

    launch: int
    uses: tuple[Use, ...]


@dataclass(slots=True)
class Launch:
    """A gradient this rank contributes. `own` becomes the reduced gradient of its shard."""

    unit: Unit
    offer: Offer
    own: torch.Tensor
    present: tuple[bool, ...] | None = None


class Exchange:
    """Puts, takes and sums. Holds at most one bucket whose sending is not done."""

    def __init__(self, station: Station, policy: Policy, pool: BufferPool, ledger: Ledger) -> None:
        self._station, self._policy, self._pool, self._ledger = station, policy, pool, ledger
        self._launched = 0
        self._sending: list[Any] = []
        self._bucket: torch.Tensor | None = None

    def number(self) -> int:
        self._launched += 1
        return self._launched

    def bucket(self, unit: Unit) -> torch.Tensor:
        return self._pool.take(unit.layout.padded_numel, unit.layout.dtype, unit.shard.device)

    def recycle(self, bucket: torch.Tensor) -> None:
        self._pool.give(bucket)

    def fill(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """A bucket with the gradients of a backward; parts nobody wrote are zero."""
        self.settle_sending()
        bucket = self.bucket(unit)
        end = 0
        for slot, grad in zip(unit.layout.slots, grads, strict=True):
            part = bucket[slot.offset : slot.end]
            part.zero_() if grad is None else part.copy_(grad.reshape(-1))
            end = slot.end
        bucket[end:].zero_()
        return bucket

    def launch(self, unit: Unit, bucket: torch.Tensor, offer: Offer) -> Launch:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        self.settle_sending()
        layout, mine = unit.layout, self._station.mesh.rank
        key = Key(unit.index, offer.launch)
        self._sending = [self._station.put(key, dst, bucket[layout.span(dst)]) for dst in self._station.mesh.peers]
        self._bucket = bucket
        self._ledger.record(Kind.REDUCE, unit.name, layout.page_bytes - layout.shard_bytes)
        return Launch(unit, offer, bucket[layout.span(mine)].clone())

    def settle_sending(self) -> None:
        sending, self._sending = self._sending, []
        for work in sending:
            work.wait()
        if self._bucket is not None:
            self._pool.give(self._bucket)
            self._bucket = None

    def total(self, unit: Unit, offers: Mapping[int, Offer], own: torch.Tensor | None) -> torch.Tensor:
        """The sum over the ranks that offer, in rank order; lands in `own` when this rank is among them."""
        mine = self._station.mesh.rank
        wide = torch.promote_types(unit.layout.dtype, torch.float32)
        total: torch.Tensor | None = None
        for rank in sorted(offers):
            part = own if rank == mine else self._station.take(Key(unit.index, offers[rank].launch), rank)
            assert part is not None
            total = part.to(wide) if total is None else total.add_(part)
        assert total is not None
        if self._policy.mean:
            total.div_(self._station.mesh.world)
        if own is None:
            self._ledger.record(Kind.JOIN, unit.name)
            return total.to(unit.layout.dtype)
        return own if total is own else own.copy_(total)

    @property
    def scale(self) -> float:
        return 1.0 / self._station.mesh.world if self._policy.mean else 1.0


def union(offers: Mapping[int, Offer]) -> tuple[Use, ...]:
    """For each parameter, the most that any rank does with its gradient."""
    return tuple(max(uses) for uses in zip(*(offer.uses for offer in offers.values()), strict=True))
