"""The transport over collectives of torch.distributed, and for ranks that stray from their order.

[Note: who goes by what]

| what                                             | goes                                                    |
|--------------------------------------------------|---------------------------------------------------------|
| a page while shards are at rest                  | by an all-gather, which is a want (transport/order)     |
| a page between an edit and the next step         | one-sidedly: its readers name the state they need       |
| a gradient in its backward                       | by an all-to-all or a reduce-scatter, which is a want   |
| gradients that a meeting asks for                | by the same calls: after a meeting all know what comes  |
| a step at which nobody has anything to say       | by the order's own agreement                            |
| what ranks say at other meetings                 | by messages, when the order has brought them together   |
| a page or gradient of a rank that strays         | one-sidedly; it takes part in calls all the same        |

The order is one for all ranks, also where they are replicas of a model: then a call is one of this replica's ranks, and
gradients, which replicas add up together, go one-sidedly.

`aside` is a transport that needs no other rank's main thread (one_sided.py, on a device staged.py).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch

from retrograde.devices import Stream, Streams
from retrograde.transport.collective.communicator import (
    Communicator,
    ExchangeOffer,
    GatherOffer,
    SumOffer,
)
from retrograde.transport.collective.conductor import Conductor
from retrograde.transport.collective.courtesy import Courtesies, present_parts
from retrograde.transport.collective.labels import ReductionLabel
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
from retrograde.transport.protocol import GatheredShards, GradientWant, Memory, Mirror, Position, Transport, Work


def patience_of(timeout: float) -> Patience:
    """How long others are waited for before a rank goes on without them. A rank that is late may be served
    one-sidedly then; only after all of `timeout` it is an error."""
    return Patience(
        starting=min(30.0, timeout / 4), surprise=min(8.0, timeout / 8), nudge=min(2.0, timeout / 30), limit=timeout
    )


class CollectiveTransport:
    """Implements `Transport`."""

    def __init__(self, aside: Transport, host: OneSidedTransport, streams: Streams, shards: GatheredShards) -> None:
        """`host`: whose connections carry messages; `aside` may be the same. `shards`: of the device."""
        self._aside = aside
        self._host = host
        self._streams = streams
        self._shards = shards
        self._courtesies: Courtesies | None = None  # where strays are served
        self._communicator: Communicator | None = None
        self._conductor: Conductor | None = None

    @property
    def rank(self) -> int:
        return self._aside.rank

    @property
    def world(self) -> int:
        return self._aside.world

    @property
    def meetings(self) -> int:
        """But for those at which a rank was at the end of a backward: the others may be in an earlier or later one, and
        go on counting (gradients/keys.py)."""
        return self._aside.meetings if self._conductor is None else self._conductor.passed

    @property
    def timeout(self) -> float:
        return self._aside.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._aside.timeout = seconds

    def open(self, rows: Sequence[Sequence[int]]) -> None:
        """All ranks have agreed on how the model is sharded. Pages are prefetched by who knows what follows them."""
        patience = patience_of(self.timeout)
        if not self._streams.on_host:
            patience = Patience(starting=self.timeout, surprise=self.timeout, nudge=self.timeout, limit=self.timeout)
        participant = Participant(self.rank, self.world, OrderPolicy(depth=0, patience=patience))
        self._communicator = Communicator(self._host, self._streams, rows)
        if self._streams.on_host:
            self._courtesies = Courtesies(self._communicator, self._shards, self._streams)
        conductor = Conductor(participant, self._host, self._communicator, self._courtesies, patience.nudge)
        mine = Position(Reason.VALUE, "the order of collectives", {}, {}, participant.fingerprint)
        if any(theirs.value != participant.fingerprint for theirs in self._aside.meet(mine)):
            self.fail(f"rank {self.rank}: ranks have different versions of retrograde; install the same on all")
        self._conductor = conductor  # all are listening now

    @property
    def _opened(self) -> tuple[Communicator, Conductor]:
        assert self._communicator is not None, "open() comes first"
        assert self._conductor is not None, "open() comes first"
        return self._communicator, self._conductor

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        return self._aside.allocate(memory, numel, dtype, stream)

    def mirror(self, unit: int, spans: Mapping[int, slice], dtype: torch.dtype, returns: bool) -> Mirror | None:
        return None

    # ---- shards
    def gather(self, unit: int, name: str, shard: torch.Tensor, memory: torch.Tensor) -> Work | None:
        """Start making a page of all ranks' shards, in `memory`. Every rank's are at rest."""
        self.check()
        offer = GatherOffer(shard, memory, self._streams.fetching)
        _, conductor = self._opened
        return conductor.want(Gather(unit), offer, f"the gather of unit {name}")

    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        return self._aside.read(unit, name, stamp, into)

    def shards_changed(self) -> None:
        self._aside.shards_changed()

    def reclaim(self, at_fence: bool) -> None:
        """Its shards show nowhere."""

    # ---- gradients, all ranks at once
    def exchange(self, want: GradientWant, parts: torch.Tensor, received: torch.Tensor) -> Work | None:
        """Start sending to each rank its part, and receiving this rank's, in the order of ranks."""
        return self._reduce(want, ExchangeOffer(parts, received, self._streams.reducing))

    def present(self, received: torch.Tensor) -> dict[int, torch.Tensor]:
        return present_parts(received, self.world)

    def add_up(self, want: GradientWant, whole: torch.Tensor, total: torch.Tensor) -> Work | None:
        """Start adding up `whole` over all ranks, in the backend's order; this rank's part of it goes to `total`."""
        return self._reduce(want, SumOffer(whole, total, self._streams.reducing))

    def _reduce(self, want: GradientWant, offer: ExchangeOffer | SumOffer) -> Work | None:
        self.check()
        communicator, conductor = self._opened
        if want.at_meeting:
            return communicator.start(offer)
        label = ReductionLabel.of(want.key, offer[0].dtype, want.uses)
        return conductor.want(label.want(want.key.unit), offer, f"the reduction of unit {want.name}")

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        return self._aside.put(key, parts)

    def keep(self, key: Key, parts: dict[int, torch.Tensor]) -> None:
        assert self._courtesies is not None
        with self._host.connections.changed:
            self._courtesies.keep(key, parts)

    def arrived(self, key: Key, src: int) -> bool:
        return self._came_in_a_call(key, src) or self._aside.arrived(key, src)

    def _came_in_a_call(self, key: Key, src: int) -> bool:
        """All calls before a meeting are done when it takes place, so it is known then by which way a part comes."""
        return self._courtesies is not None and self._courtesies.has(key, src)

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        if self._courtesies is None or not self._courtesies.has(key, src):
            return self._aside.take(key, src, unit)
        with self._host.connections.changed:
            return self._courtesies.take(key, src)

    def discard_parts(self) -> None:
        self._host.discard_before(self.meetings)
        if self._courtesies is not None:
            with self._host.connections.changed:
                self._courtesies.discard_before(self.meetings)

    # ---- agreement
    def meet(self, position: Position) -> list[Position]:
        if self._conductor is None:
            return self._aside.meet(position)
        self.check()
        boundary = STEP if position.reason is Reason.STEP else SOFT_STEP
        says_something = bool(position.sent or position.pending) or position.value is not None
        name = position.label if boundary is SOFT_STEP or says_something else ""
        places = self._conductor.arrive(boundary, name, f"{position.reason} ({position.label})")
        if all(place.boundary == STEP and not place.name for place in places):
            self._conductor.passed += 1
            return [position] * self.world
        positions = self._aside.meet(position)
        if all(theirs.reason is not Reason.BACKWARD for theirs in positions):
            self._conductor.passed += 1
        return positions

    def meeting_is_over(self) -> None:
        if self._conductor is not None:
            self._conductor.rest()

    # ---- failure
    def check(self) -> None:
        self._aside.check()

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._aside.fail(text, cause)

    def shared_fate(self, what: str) -> AbstractContextManager[None]:
        return self._aside.shared_fate(what)
