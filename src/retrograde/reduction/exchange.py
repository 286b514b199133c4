"""One unit's gradient on its way: every rank's part goes to its owner, who adds them in rank order.

[Note: exactness]
The sum is ((g0 + g1) + g2) + ... in rank order, in fp32 or wider whatever travelled, then one division by the
world size for `reduce="mean"`. It does not depend on which parts arrived first, so it is the same at every run
and equal to playing the ranks one after the other in one process. A rank without a gradient is left out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch

from retrograde.comm import Event, Key, Station, Streams, Turn
from retrograde.layout import Policy
from retrograde.ledger import Kind, Ledger
from retrograde.reduction.bucket import Bucket, Grads, huge
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
        self._station, self.policy, self._pool, self._ledger = station, policy, pool, ledger
        self._streams: Streams = pool.streams
        self._launched = 0
        self._sending: list[Any] = []
        self._sent: tuple[Bucket, Event] | None = None
        self._since = -1
        self._turns: Counter[Part] = Counter()

    def number(self) -> int:
        self._launched += 1
        return self._launched

    def bucket(self, unit: Unit) -> Bucket:
        """For gradients that wait."""
        self.settle_sending()  # its memory is free before more is taken
        return Bucket(unit, self._pool, {})

    def fill(self, unit: Unit, grads: Grads) -> Bucket:
        """For gradients that are launched now."""
        self.settle_sending()
        bucket = Bucket(unit, self._pool, huge(grads))
        bucket.add(grads)
        return bucket

    def launch(self, bucket: Bucket, offer: Offer, early: bool = False) -> Launch:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        self.settle_sending()
        unit, mesh, stream = bucket.unit, self._station.mesh, self._streams.reducing
        layout, key, turn = unit.layout, Key(unit.index, offer.launch), self._turn(Part(unit.index, early))
        own = stream.empty(layout.shard_numel, layout.dtype)

        def send() -> None:
            for dst in mesh.peers:
                self._sending += self._station.put(key, turn, dst, bucket.parts(dst))
            torch.cat(bucket.parts(mesh.rank), out=own)

        bucket.close(stream)
        stream.run(send)
        self._sent = (bucket, stream.record())
        self._ledger.record(Kind.REDUCE, unit.name, layout.page_bytes - layout.shard_bytes)
        return Launch(unit, offer, own, turn)

    def _turn(self, part: Part) -> Turn:
        if self._since != self._station.meetings:
            self._since, self._turns = self._station.meetings, Counter()
        self._turns[part] += 1
        return self._since, 2 * self._turns[part] + part.early

    def settle_sending(self) -> None:
        sending, self._sending = self._sending, []
        for work in sending:
            self._station.finish(work, "for a rank to take its part of a gradient")
        if self._sent is not None:
            bucket, read = self._sent
            self._sent = None
            bucket.release(read)

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
        wide, stream = torch.promote_types(unit.layout.dtype, torch.float32), self._streams.reducing
        launch.added[rank] = number
        if launch.sum is None and part.dtype == wide:
            launch.sum = part
        elif launch.sum is None:
            total = launch.sum = stream.empty(part.numel(), wide)
            stream.run(lambda: total.copy_(part))
        else:
            stream.run(partial(launch.sum.add_, part))

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
        stream, own, total = self._streams.reducing, launch.own, launch.sum
        launch.sum = None
        if self.policy.mean:
            stream.run(lambda: total.div_(self._station.mesh.world))
        if total is not own:
            stream.run(lambda: own.copy_(total))
        self._streams.current().wait(stream.record())
        return own

    def join(self, unit: Unit, offers: Mapping[int, Offer]) -> torch.Tensor:
        """The same sum on a rank that has nothing to add."""
        self._ledger.record(Kind.JOIN, unit.name)
        layout = unit.layout
        launch = Launch(unit, Offer(0, ()), self._streams.reducing.empty(layout.shard_numel, layout.dtype), (0, 0))
        return self.total(launch, offers)

    @property
    def scale(self) -> float:
        return 1.0 / self._station.mesh.world if self.policy.mean else 1.0


def accumulated(offers: Mapping[int, Offer]) -> tuple[bool, ...]:
    """For each parameter, whether its gradient goes to `.grad` on any rank."""
    return tuple(Use.ACCUMULATED in uses for uses in zip(*(offer.uses for offer in offers.values()), strict=True))
