"""The transport over collectives of torch.distributed, and for ranks that stray from their order.

[Note: who goes by what]

| what                                             | goes                                                    |
|--------------------------------------------------|---------------------------------------------------------|
| a page while shards are at rest                  | by an all-gather, which is a want (transport/order)     |
| a page between an edit and the next step         | one-sidedly: its readers name the state they need       |
| a gradient in its backward                       | by an all-to-all or a reduce-scatter, which is a want   |
| gradients that a meeting asks for                | by the same calls: after a meeting all know what comes  |
| a step at which nobody has anything to say       | by the order's own agreement                            |
| what ranks say at other meetings                 | by messages, when the order has brought them together;  |
|                                                  | tensors of a device by an all-gather                    |
| a page or gradient of a rank that strays         | one-sidedly; it takes part in calls all the same        |

The order is one for all ranks, also where they are replicas of a model: then the call of a gather is one of this
replica's ranks, and a reduction is two calls (replicas.py).

`aside` is a transport that needs no other rank's main thread (one_sided.py, on a device staged.py).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn

import torch

from retrograde.devices import Stream, Streams
from retrograde.transport.collective.communicator import CallWork, ExchangeOffer, GatherOffer, SumOffer
from retrograde.transport.collective.conductor import CallPatience, Conductor
from retrograde.transport.collective.courtesy import (
    Courtesies,
    first_bytes,
    first_size,
    looks_absent,
    parts_by_rank,
    present_parts,
    spread_absence,
)
from retrograde.transport.collective.labels import ReductionLabel
from retrograde.transport.collective.replicas import AnyOffer, MeshCommunicator, TwoStepOffer, sum_in_two_steps
from retrograde.transport.messages import Key, Reason, Stamp
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.order import (
    SOFT_STEP,
    STEP,
    Gather,
    OrderPolicy,
    Participant,
    Patience,
)
from retrograde.transport.protocol import (
    CourtesySum,
    GatheredShards,
    GradientWant,
    Memory,
    Position,
    ReplicaExchange,
    Transport,
    Work,
)
from retrograde.transport.staged import from_host
from retrograde.transport.values import exchange


def patience_of(timeout: float, on_host: bool) -> Patience:
    """How long a rank waits for others before it goes on without them. A rank that is late may be served one-sidedly
    then, which on a device costs more; only after all of `timeout` it is an error."""
    nudge = min(2.0 if on_host else 5.0, timeout / 30)
    return Patience(starting=min(30.0, timeout / 4), surprise=min(8.0, timeout / 8), nudge=nudge, limit=timeout)


class CollectiveStart(NamedTuple):
    """What there is of a collective transport before all ranks have agreed on how the model is sharded. They agree over
    `aside`.

    `host`: the transport whose connections carry messages; `aside` may be the same. `shards`: of the device."""

    aside: Transport
    host: OneSidedTransport
    streams: Streams
    shards: GatheredShards

    def open(self, rows: Sequence[Sequence[int]]) -> "CollectiveTransport":
        """Make the transport, when ranks have agreed. `rows`: the ranks of each replica, by shard. Pages are prefetched
        by whoever knows what follows them, not by the order (`depth`)."""
        timeout, rank = self.aside.timeout, self.aside.rank
        patience = patience_of(timeout, self.streams.on_host)
        participant = Participant(rank, self.aside.world, OrderPolicy(depth=0, patience=patience))
        communicator = MeshCommunicator(self.host, self.streams, rows)
        courtesies = Courtesies(communicator, self.shards, self.streams)
        calls = CallPatience(wanted=patience.nudge, courtesy=timeout / 8)
        conductor = Conductor(participant, self.host, communicator, courtesies, calls)
        told = exchange(self.aside, "the order of collectives", participant.fingerprint)  # all are listening now
        if any(theirs != participant.fingerprint for theirs in told):
            self.aside.fail(f"rank {rank}: ranks have different versions of retrograde; install the same on all")
        return CollectiveTransport(self, communicator, courtesies, conductor)


class CollectiveTransport:
    """Implements `OrderedTransport` by calls of collectives, and over `aside` for ranks that stray."""

    def __init__(
        self, start: CollectiveStart, communicator: MeshCommunicator, courtesies: Courtesies, conductor: Conductor
    ) -> None:
        self._aside = start.aside
        self._host = start.host
        self._streams = start.streams
        self._communicator = communicator
        self._courtesies = courtesies
        self._conductor = conductor

    @property
    def rank(self) -> int:
        return self._aside.rank

    @property
    def world(self) -> int:
        return self._aside.world

    @property
    def meetings(self) -> int:
        """How many meetings have been passed, without those at which a rank was at the end of a backward: the others
        may be in an earlier or later one, and go on counting (gradients/keys.py)."""
        return self._conductor.passed

    @property
    def timeout(self) -> float:
        return self._aside.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._aside.timeout = seconds

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        return self._aside.allocate(memory, numel, dtype, stream)

    # ---- shards
    def gather(self, unit: int, name: str, shard: torch.Tensor, memory: torch.Tensor) -> Work | None:
        """Start making a page of all ranks' shards, in `memory`. All shards are at rest."""
        self.check()
        offer = GatherOffer(shard, memory, self._streams.fetching)
        return self._conductor.want(Gather(unit), offer, f"the gather of unit {name}")

    @property
    def detours(self) -> int:
        return self._conductor.detours

    @property
    def shards(self) -> int:
        return self._communicator.size

    def gather_tensors(self, mine: torch.Tensor, gathered: torch.Tensor) -> Work:
        """Start gathering a tensor of each rank. This is no want: a meeting has said that all ranks do it next."""
        return self._start(GatherOffer(mine, gathered, self._streams.current()), "a gather of values")

    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        return self._aside.read(unit, name, stamp, into)

    def shards_changed(self) -> None:
        self._aside.shards_changed()

    # ---- gradients, all ranks at once
    def exchange(self, want: GradientWant, parts: torch.Tensor, received: torch.Tensor) -> Work | None:
        """Start sending to each rank its part, and receiving this rank's, in the order of ranks."""
        offer = ExchangeOffer(parts, received, self._streams.reducing)
        return self._reduce(want, offer, ReductionLabel.of(want.key, parts.dtype, parts.dtype, True, want.uses))

    def exchange_sums(self, want: GradientWant, offered: ReplicaExchange) -> Work | None:
        """Start an exchange among this replica's ranks,
        and then one of replicas' sums among the holders of this rank's shard."""
        stream = self._streams.reducing

        def between() -> None:
            offered.add_up()
            stream.run(lambda: spread_absence(offered.received, self._communicator.size, offered.own))

        first = ExchangeOffer(offered.parts, offered.received, stream)
        offer = TwoStepOffer(first, between, GatherOffer(offered.own, offered.sums, stream))
        label = ReductionLabel.of(want.key, offered.parts.dtype, offered.sums.dtype, True, want.uses)
        return self._reduce(want, offer, label)

    def complete(self, exchanges: Sequence[tuple[Work, torch.Tensor]]) -> list[bool]:
        """Say of each exchange whether every rank brought a part. On a device the first elements come to the host, and
        all of it only if they look like somebody's absence."""
        if self._streams.on_host:
            return [self._is_complete(brought) for _, brought in exchanges]
        for work, _ in exchanges:
            assert isinstance(work, CallWork)
            work.wait_on_host()
        stream = self._streams.reducing
        count = self._summands
        firsts: list[torch.Tensor] = []
        stream.run(lambda: firsts.append(torch.cat([first_bytes(each, count) for _, each in exchanges])))
        found = stream.to_host(firsts[0]).split_with_sizes([first_size(each, count) for _, each in exchanges])
        pairs = zip(found, exchanges, strict=True)
        return [not looks_absent(bytes_, count) or self._is_complete(each) for bytes_, (_, each) in pairs]

    def _is_complete(self, brought: torch.Tensor) -> bool:
        on_host = self._streams.reducing.to_host(brought)
        return len(present_parts(on_host, self._summands)) == self._summands

    @property
    def _summands(self) -> int:
        """How many rows an exchange brings: ranks' parts, or replicas' sums."""
        return self._communicator.replicas if self._communicator.replicas > 1 else self.world

    def present(self, received: torch.Tensor) -> dict[int, torch.Tensor]:
        return parts_by_rank(self._streams.reducing.to_host(received), self._communicator.owners)

    def add_up(self, want: GradientWant, whole: torch.Tensor, total: torch.Tensor) -> Work | None:
        """Start adding up `whole` over all ranks, in the backend's order; this rank's part of it goes to `total`."""
        stream = self._streams.reducing
        one_replica = self._communicator.replicas == 1
        offer = SumOffer(whole, total, stream) if one_replica else sum_in_two_steps(whole, total, stream)
        return self._reduce(want, offer, ReductionLabel.of(want.key, total.dtype, total.dtype, False, want.uses))

    def _reduce(self, want: GradientWant, offer: AnyOffer, label: ReductionLabel) -> Work | None:
        self.check()
        what = f"the reduction of unit {want.name}"
        if want.at_meeting:
            return self._start(offer, what)
        return self._conductor.want(label.want(want.key.unit), offer, what)

    def _start(self, offer: AnyOffer, what: str) -> Work:
        """Start a call at a meeting, after which all ranks start the same."""
        try:
            return self._communicator.start(offer)
        except RuntimeError as error:
            self._host.fail_of_backend(what, error)

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        return self._aside.put(key, parts)

    def keep(self, key: Key, parts: dict[int, torch.Tensor]) -> None:
        with self._host.connections.changed:
            self._courtesies.keep(key, parts)

    def arrived(self, key: Key, src: int) -> bool:
        return self._came_in_a_call(key, src) or self._aside.arrived(key, src)

    def _came_in_a_call(self, key: Key, src: int) -> bool:
        """Has this part come in a call? All calls before a meeting are done when it takes place, so it is known then by
        which way a part comes."""
        return self._courtesies.has(key, src)

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        if not self._courtesies.has(key, src):
            return self._aside.take(key, src, unit)
        with self._host.connections.changed:
            came = self._courtesies.take(key, src)
        return from_host(came, self._streams)

    def take_sums(self) -> list[CourtesySum]:
        if not self._courtesies.has_sums:
            return []
        with self._host.connections.changed:
            taken = self._courtesies.take_sums()
        return [brought._replace(total=from_host(brought.total, self._streams)) for brought in taken]

    def discard_parts(self) -> None:
        self._host.discard_before(self.meetings)
        with self._host.connections.changed:
            self._courtesies.discard_before(self.meetings)

    # ---- agreement
    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        self.check()
        boundary = STEP if position.reason is Reason.STEP else SOFT_STEP
        says_something = bool(position.sent or position.pending) or position.value is not None
        name = position.label if boundary is SOFT_STEP or says_something else ""
        settled = self._conductor.arrive(boundary, name, f"{position.reason} ({position.label})")
        if settled.boundary == STEP and not any(place.name for place in settled.places):
            self._conductor.passed += 1
            return [position] * self.world
        if anew is not None and self._courtesies.has_sums:
            position = anew()
        positions = self._aside.meet(position)
        if all(theirs.reason is not Reason.BACKWARD for theirs in positions):
            self._conductor.passed += 1
        return positions

    def meeting_is_over(self) -> None:
        self._conductor.rest()

    # ---- failure
    def check(self) -> None:
        self._aside.check()

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._aside.fail(text, cause)

    def shared_fate(self, what: str) -> AbstractContextManager[None]:
        return self._aside.shared_fate(what)
