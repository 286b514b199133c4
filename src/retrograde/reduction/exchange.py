"""One unit's gradient on its way: every rank's part goes to its owner, who adds them in rank order.

[Note: exactness]
The sum is ((g0 + g1) + g2) + ... in rank order, in fp32 or wider whatever travelled, then one division by the
world size for `reduce="mean"`. It does not depend on which parts arrived first, so it is the same at every run
and equal to playing the ranks one after the other in one process. A rank without a gradient is left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from retrograde.comm import Key, Station, Turn
from retrograde.layout import Policy
from retrograde.ledger import Kind, Ledger
from retrograde.residency import BufferPool, Unit


class Use(IntEnum):
    """What a backward does with a parameter's gradient on one rank."""

    NONE = 0
    CAPTURED = 1  # torch.autograd.grad returns it
    ACCUMULATED = 2  # it goes to .grad


class Part(NamedTuple):
    """What the ranks add up together: a unit's gradient, or (`early`) what waited of it and had to make room."""

    unit: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says at a meeting about a gradient it has put, or will put."""

    launch: int
    uses: tuple[Use, ...]


@dataclass(slots=True)
class Launch:
    """A gradient this rank contributes. `own` becomes the reduced gradient of its shard.

    `sum` is what has been added up so far, over the ranks in `added` (rank -> launch number), always a prefix of
    all ranks: parts are folded in as they come, in rank order, so that they need not be kept.
    """

    unit: Unit
    offer: Offer
    own: torch.Tensor
    turn: Turn
    sum: torch.Tensor | None = None
    added: dict[int, int] = field(default_factory=dict)
    present: tuple[bool, ...] | None = None


class Exchange:
    """Puts, takes and sums. Holds at most one bucket whose sending is not done."""

    def __init__(self, station: Station, policy: Policy, pool: BufferPool, ledger: Ledger) -> None:
        self._station, self._policy, self._pool, self._ledger = station, policy, pool, ledger
        self._launched = 0
        self._sending: list[Any] = []
        self._bucket: torch.Tensor | None = None
        self._since = -1
        self._turns: Counter[Part] = Counter()

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

    def launch(self, unit: Unit, bucket: torch.Tensor, offer: Offer, early: bool = False) -> Launch:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        self.settle_sending()
        layout, mine = unit.layout, self._station.mesh.rank
        key = Key(unit.index, offer.launch)
        turn = self._turn(Part(unit.index, early))
        peers = self._station.mesh.peers
        self._sending = [self._station.put(key, turn, dst, bucket[layout.span(dst)]) for dst in peers]
        self._bucket = bucket
        self._ledger.record(Kind.REDUCE, unit.name, layout.page_bytes - layout.shard_bytes)
        return Launch(unit, offer, bucket[layout.span(mine)].clone(), turn)

    def _turn(self, part: Part) -> Turn:
        if self._since != self._station.meetings:
            self._since, self._turns = self._station.meetings, Counter()
        self._turns[part] += 1
        return self._since, 2 * self._turns[part] + part.early

    def settle_sending(self) -> None:
        sending, self._sending = self._sending, []
        for work in sending:
            self._station.finish(work, "for a rank to take its part of a gradient")
        if self._bucket is not None:
            self._pool.give(self._bucket)
            self._bucket = None

    def fold(self, launch: Launch) -> None:
        """Add the parts that have come, as far as no rank before them is missing."""
        mesh = self._station.mesh
        for rank in range(len(launch.added), mesh.world):
            if rank == mesh.rank:
                self._add(launch, rank, launch.offer.launch)
            elif key := self._station.arrived(launch.unit.index, rank, launch.turn):
                self._add(launch, rank, key.launch)
            else:
                return

    def _add(self, launch: Launch, rank: int, number: int) -> None:
        unit = launch.unit
        mine = rank == self._station.mesh.rank
        part = launch.own if mine else self._station.take(Key(unit.index, number), rank)
        wide = torch.promote_types(unit.layout.dtype, torch.float32)
        launch.sum = part.to(wide) if launch.sum is None else launch.sum.add_(part)
        launch.added[rank] = number

    def total(self, launch: Launch, offers: Mapping[int, Offer]) -> torch.Tensor:
        """The sum over the ranks that offer, in rank order, in `launch.own`."""
        for rank in sorted(offers):
            if rank not in launch.added:
                self._add(launch, rank, offers[rank].launch)
        wrong = [r for r, number in launch.added.items() if r not in offers or offers[r].launch != number]
        if wrong:
            self._station.fail(
                f"rank {self._station.mesh.rank}: rank {wrong[0]} gave up a backward in which it had already sent its "
                f"gradient of unit {launch.unit.name}, and this rank did not; let all ranks give up a backward, or none"
            )
        assert launch.sum is not None
        if self._policy.mean:
            launch.sum.div_(self._station.mesh.world)
        total, launch.sum = launch.sum, None
        return launch.own if total is launch.own else launch.own.copy_(total)

    def join(self, unit: Unit, offers: Mapping[int, Offer]) -> torch.Tensor:
        """The same sum on a rank that has nothing to add."""
        self._ledger.record(Kind.JOIN, unit.name)
        layout = unit.layout
        launch = Launch(unit, Offer(0, ()), torch.empty(layout.shard_numel, dtype=layout.dtype), (0, 0))
        return self.total(launch, offers)

    @property
    def scale(self) -> float:
        return 1.0 / self._station.mesh.world if self._policy.mean else 1.0


def union(offers: Mapping[int, Offer]) -> tuple[Use, ...]:
    """For each parameter, the most that any rank does with its gradient."""
    return tuple(max(uses) for uses in zip(*(offer.uses for offer in offers.values()), strict=True))
