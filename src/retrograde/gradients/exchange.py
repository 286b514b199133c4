"""One unit's gradient on its way: every rank's part goes to its owner, who adds them in rank order.

[Note: exactness]
The sum is ((g0 + g1) + g2) + ... in rank order, in fp32 or wider whatever travelled, then one division by the
world size for `reduce="mean"`. It does not depend on which parts arrived first, so it is the same at every run
and equal to playing the ranks one after the other in one process. A rank without a gradient is left out.

[Note: the life of a launch]

    SENT --> SUMMED --> DELIVERED
    SENT --> GIVEN_UP

Every rank's part is on its way (SENT), all parts have been added up (SUMMED), Pack has handed them to the leaves
(DELIVERED). A backward that raises gives up what it has sent and nobody has added up yet.

Rule 1: what a rank has launched is added up at its next meeting, whatever the meeting is for. So ranks that launched
        under equal keys add up at the same meeting, also where one of them is in a backward inside another one.
Rule 2: parts are added as they come, before the meeting, if their key is that of a launch of this rank.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist

from retrograde.devices import Event
from retrograde.gradients.bucket import Bucket, Grads, huge
from retrograde.layout import Policy
from retrograde.ledger import Activity, Ledger
from retrograde.pages import BufferPool, Unit
from retrograde.transport import Key, Offers, Sending, Station, Use, Uses


class State(Enum):
    SENT = auto()
    SUMMED = auto()
    DELIVERED = auto()
    GIVEN_UP = auto()


_NEXT = {State.SENT: {State.SUMMED, State.GIVEN_UP}, State.SUMMED: {State.DELIVERED}}


@dataclass(slots=True, eq=False)
class Launch:
    """A gradient this rank contributes. `own` becomes the reduced gradient of its shard.

    `early`: it waited in a window, and had to make room for others.
    `sum` is what has been added up so far, over the ranks in `added`: parts are folded in as they come, in rank order,
    so that they need not be kept.
    """

    unit: Unit
    key: Key
    uses: Uses
    own: torch.Tensor
    bucket: Bucket | None  # until it is sent
    early: bool = False
    state: State = State.SENT
    sum: torch.Tensor | None = None
    added: list[int] = field(default_factory=list)
    reached: tuple[bool, ...] = ()  # the parameters whose .grad this rank's Pack adds to
    wanted: tuple[bool, ...] = ()  # when SUMMED: those whose gradients go to .grad, on any rank

    def become(self, state: State) -> None:
        if state not in _NEXT.get(self.state, ()):
            name, now = self.unit.name, self.state.name
            raise RuntimeError(f"a gradient of unit {name} cannot become {state.name}: it is {now}")
        self.state = state

    @property
    def packed(self) -> tuple[bool, ...]:
        """For which parameters Pack has a gradient: what is captured here, and what it can add to `.grad`."""
        each = zip(self.uses, self.delivered_by_pack, strict=True)
        return tuple(use is Use.CAPTURED or delivered for use, delivered in each)

    @property
    def delivered_by_pack(self) -> tuple[bool, ...]:
        return tuple(wanted and reached for wanted, reached in zip(self.wanted, self.reached, strict=True))

    @property
    def left_over(self) -> tuple[bool, ...]:
        """What goes to `.grad` though Pack does not add to it: `inputs=` leaves it out here, or it is captured."""
        return tuple(wanted and not reached for wanted, reached in zip(self.wanted, self.reached, strict=True))


class Exchange:
    """Puts, takes and sums. Holds at most one bucket whose sending is not done."""

    def __init__(self, station: Station, policy: Policy, pool: BufferPool, ledger: Ledger) -> None:
        self._station, self.policy, self.pool, self._ledger, self._streams = station, policy, pool, ledger, pool.streams
        self._sent: tuple[list[Sending], Bucket, Event] | None = None
        self._since = -1
        self._attempt = 0
        self._turns: Counter[tuple[int, bool]] = Counter()

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which a gradient travels; there is no narrow complex number."""
        return dtype if self.policy.wire is None or dtype.is_complex else self.policy.wire

    def key(self, unit: Unit, early: bool = False) -> Key:
        """For a gradient that is launched now. Turn 0 is what a meeting that flushes asks for, an odd turn what had to
        make room."""
        if self._since != self._station.meetings:
            self._since, self._attempt, self._turns = self._station.meetings, 0, Counter()
        self._turns[unit.index, early] += 1
        return Key(unit.index, self._since, self._attempt, 2 * self._turns[unit.index, early] + early)

    def send(self, unit: Unit, grads: Grads, uses: Uses) -> Launch:
        """Launch gradients: those for which there is a use."""
        self.settle_sending()
        bucket = Bucket(unit, self.pool, huge(grads) if self.policy.exact else {})
        bucket.add(grads)
        return self.launch(bucket, self.key(unit), uses)

    def launch(self, bucket: Bucket, key: Key, uses: Uses, early: bool = False) -> Launch:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        layout, stream = bucket.unit.layout, self._streams.reducing
        own = stream.empty(layout.shard_numel, layout.dtype)
        launch = Launch(bucket.unit, key, uses, own, bucket, early, reached=(False,) * len(uses))
        bucket.close(stream)
        if self.policy.exact:
            self._put(launch, bucket)
        elements, wire = layout.padded_numel - layout.shard_numel, self._wire(layout.dtype)
        self._ledger.record(Activity.REDUCE, bucket.unit.name, elements * wire.itemsize)
        return launch

    def _put(self, launch: Launch, bucket: Bucket) -> None:
        self.settle_sending()
        mesh, stream = self._station.mesh, self._streams.reducing
        wire, sending = self._wire(launch.unit.layout.dtype), list[Sending]()
        own_parts = bucket.parts(mesh.rank)
        peers_parts = {dst: bucket.parts(dst) for dst in mesh.peers}

        def send() -> None:
            for dst, parts in peers_parts.items():
                sending.append(self._station.put(launch.key, dst, [part.to(wire) for part in parts]))
            torch.cat([part.to(wire) for part in own_parts], out=launch.own)

        stream.run(send)
        launch.bucket = None
        self._sent = sending, bucket, stream.record()

    def _reduce_scatter(self, launch: Launch, bucket: Bucket) -> torch.Tensor:
        """In the backend's own order, of which it says nothing (a ring, on those that have one)."""
        part = torch.empty(launch.own.numel(), dtype=self._wire(launch.own.dtype))
        dist.reduce_scatter_single(part, bucket.store.to(part.dtype), group=self._station.mesh.group())
        launch.bucket = None
        bucket.release(self._streams.reducing.record())
        return torch.div(part, self._station.mesh.world if self.policy.mean else 1, out=launch.own)

    def give_up(self, launch: Launch) -> None:
        """Its backward raised. What this rank launches next is another attempt: others may still get these parts."""
        launch.become(State.GIVEN_UP)
        if launch.bucket is not None:
            launch.bucket.discard()
        self._attempt += 1
        self._turns.clear()

    def settle_sending(self) -> None:
        if self._sent is not None:
            (sending, bucket, read), self._sent = self._sent, None
            self._station.finish(sending)
            bucket.release(read)

    def fold(self, launch: Launch) -> None:
        """Add the parts that have come, as far as no rank before them is missing."""
        if not self.policy.exact:
            return
        mesh = self._station.mesh
        for rank in range(len(launch.added), mesh.world):
            if rank != mesh.rank and not self._station.arrived(launch.key, rank):
                return
            self._add(launch, rank)

    def _add(self, launch: Launch, rank: int) -> None:
        unit = launch.unit
        part = launch.own if rank == unit.rank else self._station.take(launch.key, rank, unit.name)
        wide, stream = torch.promote_types(unit.layout.dtype, torch.float32), self._streams.reducing
        launch.added.append(rank)
        if launch.sum is not None:
            stream.run(partial(launch.sum.add_, part))
        elif part.dtype == wide:
            launch.sum = part
        else:
            launch.sum = stream.empty(part.numel(), wide)
            stream.run(partial(launch.sum.copy_, part))

    def total(self, launch: Launch, offers: Mapping[int, Uses]) -> torch.Tensor:
        """The sum over the ranks that offer, in rank order, in `launch.own`."""
        if launch.bucket is not None:  # it waits for what the meeting says (`exact=False`)
            if len(offers) == self._station.mesh.world:
                return self._reduce_scatter(launch, launch.bucket)
            self._put(launch, launch.bucket)  # some ranks have nothing: parts travel one by one
        for rank in sorted(offers):
            if rank not in launch.added:
                self._add(launch, rank)
        if wrong := [rank for rank in launch.added if rank not in offers]:
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

    def join(self, unit: Unit, key: Key, offers: Mapping[int, Uses]) -> torch.Tensor:
        """The sum of what other ranks launched, where this one has nothing to add."""
        self._ledger.record(Activity.JOIN, unit.name)
        own = self._streams.reducing.empty(unit.layout.shard_numel, unit.layout.dtype)
        return self.total(Launch(unit, key, (), own, None), offers)


def accumulated(offers: Mapping[int, Uses]) -> tuple[bool, ...]:
    """For each parameter, whether its gradient goes to `.grad` on any rank."""
    return tuple(Use.ACCUMULATED in uses for uses in zip(*offers.values(), strict=True))


def by_key(offers: Mapping[int, Offers]) -> dict[Key, dict[int, Uses]]:
    """rank -> key -> uses, turned into key -> rank -> uses, in the same order on all ranks."""
    keys = sorted({key for of_rank in offers.values() for key in of_rank})
    return {key: {rank: of_rank[key] for rank, of_rank in offers.items() if key in of_rank} for key in keys}
