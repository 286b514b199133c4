"""One unit's gradient on its way: every rank's part goes to its owner, who adds them in rank order.

[Note: exactness]
The sum is ((g0 + g1) + g2) + ... in rank order, in fp32 or wider whatever travelled, then one division by the
world size for `reduce="mean"`. It does not depend on which parts arrived first, so it is the same at every run
and equal to playing the ranks one after the other in one process. A rank without a gradient is left out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from retrograde.comm import Event, Key, Offer, Part, Sending, Station, Use
from retrograde.layout import Policy
from retrograde.ledger import Kind, Ledger
from retrograde.reduction.bucket import Bucket, Grads, huge
from retrograde.residency import BufferPool, Unit


@dataclass(slots=True)
class Launch:
    """A gradient this rank contributes. `own` becomes the reduced gradient of its shard.

    `sum` is what has been added up so far, over the ranks in `added` (with the keys of their parts), always a
    prefix of all ranks: parts are folded in as they come, in rank order, so that they need not be kept.
    """

    unit: Unit
    offer: Offer
    own: torch.Tensor
    bucket: Any = None
    sum: torch.Tensor | None = None
    added: dict[int, Key] = field(default_factory=dict)
    present: tuple[bool, ...] = ()


class Exchange:
    """Puts, takes and sums. Holds at most one bucket whose sending is not done."""

    def __init__(self, station: Station, policy: Policy, pool: BufferPool, ledger: Ledger) -> None:
        self._station, self.policy, self.pool, self._ledger, self._streams = station, policy, pool, ledger, pool.streams
        self._sent: tuple[list[Sending], Bucket, Event] | None = None
        self._since = -1
        self._turns: Counter[Part] = Counter()

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which a gradient travels; there is no narrow complex number."""
        return dtype if self.policy.wire is None or dtype.is_complex else self.policy.wire

    def key(self, part: Part) -> Key:
        """For a gradient that is launched now: ranks that do the same thing since their last meeting come to the same
        key. Turn 0 is what a meeting that flushes asks for, an odd turn what had to make room."""
        if self._since != self._station.meetings:
            self._since, self._turns = self._station.meetings, Counter()
        self._turns[part] += 1
        return Key(part.unit, self._since, 2 * self._turns[part] + part.early)

    def send(self, unit: Unit, grads: Grads, uses: tuple[Use, ...]) -> Launch:
        """Launch gradients: those for which there is a use."""
        self.settle_sending()
        bucket = Bucket(unit, self.pool, huge(grads) if self.policy.exact else {})
        bucket.add(grads)
        return self.launch(bucket, Offer(self.key(Part(unit.index)), uses))

    def launch(self, bucket: Bucket, offer: Offer) -> Launch:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        layout, stream = bucket.unit.layout, self._streams.reducing
        launch = Launch(bucket.unit, offer, stream.empty(layout.shard_numel, layout.dtype), bucket)
        bucket.close(stream)
        if self.policy.exact:
            self._put(launch)
        elements, wire = layout.padded_numel - layout.shard_numel, self._wire(layout.dtype)
        self._ledger.record(Kind.REDUCE, bucket.unit.name, elements * wire.itemsize)
        return launch

    def _put(self, launch: Launch) -> None:
        self.settle_sending()
        bucket, mesh, stream = launch.bucket, self._station.mesh, self._streams.reducing
        wire, sending = self._wire(launch.unit.layout.dtype), list[Sending]()

        def send() -> None:
            for dst in mesh.peers:
                parts = [part.to(wire) for part in bucket.parts(dst)]
                sending.append(self._station.put(launch.offer.key, dst, parts))
            torch.cat([part.to(wire) for part in bucket.parts(mesh.rank)], out=launch.own)

        stream.run(send)
        self._sent = sending, bucket, stream.record()

    def _reduce_scatter(self, launch: Launch) -> torch.Tensor:
        """In the backend's own order, of which it says nothing (a ring, on those that have one)."""
        part = torch.empty(launch.own.numel(), dtype=self._wire(launch.own.dtype))
        dist.reduce_scatter_single(part, launch.bucket.store.to(part.dtype), group=self._station.mesh.group())
        launch.bucket.release(self._streams.reducing.record())
        return torch.div(part, self._station.mesh.world if self.policy.mean else 1, out=launch.own)

    def give_up(self, launch: Launch) -> None:
        if not self.policy.exact and not launch.present:
            launch.bucket.discard()  # else it has been sent, and is given back by that

    def settle_sending(self) -> None:
        if self._sent is not None:
            (sending, bucket, read), self._sent = self._sent, None
            self._station.finish(sending)
            bucket.release(read)

    def fold(self, launch: Launch) -> None:
        """Add the parts that have come, as far as no rank before them is missing."""
        mesh = self._station.mesh
        for rank in range(len(launch.added), mesh.world) if self.policy.exact else ():
            if rank != mesh.rank and not self._station.arrived(launch.offer.key, rank):
                return
            self._add(launch, rank, launch.offer.key)

    def _add(self, launch: Launch, rank: int, key: Key) -> None:
        unit = launch.unit
        part = launch.own if rank == unit.rank else self._station.take(key, rank, unit.name)
        wide, stream = torch.promote_types(unit.layout.dtype, torch.float32), self._streams.reducing
        launch.added[rank] = key
        if launch.sum is not None:
            stream.run(partial(launch.sum.add_, part))
        elif part.dtype == wide:
            launch.sum = part
        else:
            launch.sum = stream.empty(part.numel(), wide)
            stream.run(partial(launch.sum.copy_, part))

    def total(self, unit: Unit, offers: Mapping[int, Offer], launch: Launch | None = None) -> torch.Tensor:
        """The sum over the ranks that offer, in rank order, in `launch.own`; without one this rank only joins."""
        if launch is None:
            self._ledger.record(Kind.JOIN, unit.name)
            own = self._streams.reducing.empty(unit.layout.shard_numel, unit.layout.dtype)
            launch = Launch(unit, next(iter(offers.values())), own)
        elif not self.policy.exact:
            if len(offers) == self._station.mesh.world:
                return self._reduce_scatter(launch)
            self._put(launch)  # some ranks have nothing: they join one by one
        for rank in sorted(offers):
            if rank not in launch.added:
                self._add(launch, rank, offers[rank].key)
        if wrong := [r for r, key in launch.added.items() if r not in offers or offers[r].key != key]:
            self._station.fail(
                f"rank {self._station.mesh.rank}: rank {wrong[0]} gave up a backward in which it had already sent its "
                f"gradient of unit {unit.name}, and this rank did not; let all ranks give up a backward, or none"
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


def accumulated(offers: Mapping[int, Offer]) -> tuple[bool, ...]:
    """For each parameter, whether its gradient goes to `.grad` on any rank."""
    return tuple(Use.ACCUMULATED in uses for uses in zip(*(offer.uses for offer in offers.values()), strict=True))
