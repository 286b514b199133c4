"""The transport over collectives of torch.distributed, for ranks that do the same between two steps.

[Note: who goes by what]

| what                                             | goes                                                    |
|--------------------------------------------------|---------------------------------------------------------|
| a page while shards are at rest                  | by an all-gather, which is a want (transport/order)     |
| a page between an edit and the next step         | one-sidedly: its readers name the state they need       |
| a gradient in its backward                       | by an all-to-all or a reduce-scatter, which is a want   |
| gradients that a meeting asks for                | by the same calls: after a meeting all know what comes  |
| a step at which nobody has anything to say       | by the order's own agreement                            |
| what ranks say at other meetings                 | by messages, when the order has brought them together   |

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
from retrograde.transport.messages import Key, Reason, Stamp
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.order import (
    SOFT_STEP,
    STEP,
    Gather,
    OrderPolicy,
    Participant,
    Patience,
    Reduce,
)
from retrograde.transport.protocol import GradientWant, Memory, Position, Transport, Work


class CollectiveTransport:
    """Implements `Transport`."""

    def __init__(self, aside: Transport, host: OneSidedTransport, streams: Streams) -> None:
        """`host`: whose connections carry messages; `aside` may be the same."""
        self._aside = aside
        self._host = host
        self._streams = streams
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
        return self._aside.meetings

    @property
    def timeout(self) -> float:
        return self._aside.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._aside.timeout = seconds

    def open(self) -> None:
        """All ranks have agreed on how the model is sharded. Pages are prefetched by who knows what follows them."""
        patience = Patience(starting=self.timeout, surprise=self.timeout, limit=self.timeout)
        participant = Participant(self.rank, self.world, OrderPolicy(depth=0, patience=patience))
        self._communicator = Communicator(self._host, self._streams)
        conductor = Conductor(participant, self._host, self._communicator)
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

    # ---- shards
    def gather(self, unit: int, name: str, shard: torch.Tensor, memory: torch.Tensor) -> Work:
        """Start making a page of all ranks' shards, in `memory`. Every rank's are at rest."""
        self.check()
        offer = GatherOffer(shard, memory, self._streams.fetching)
        _, conductor = self._opened
        return conductor.want(Gather(unit), offer, f"the gather of unit {name}")

    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        return self._aside.read(unit, name, stamp, into)

    def shards_changed(self) -> None:
        self._aside.shards_changed()

    # ---- gradients, all ranks at once
    def exchange(self, want: GradientWant, parts: torch.Tensor, received: torch.Tensor) -> Work:
        """Start sending to each rank its part, and receiving this rank's, in the order of ranks."""
        return self._reduce(want, ExchangeOffer(parts, received, self._streams.reducing))

    def add_up(self, want: GradientWant, whole: torch.Tensor, total: torch.Tensor) -> Work:
        """Start adding up `whole` over all ranks, in the backend's order; this rank's part of it goes to `total`."""
        return self._reduce(want, SumOffer(whole, total, self._streams.reducing))

    def _reduce(self, want: GradientWant, offer: ExchangeOffer | SumOffer) -> Work:
        self.check()
        communicator, conductor = self._opened
        if want.at_meeting:
            return communicator.start(offer)
        return conductor.want(Reduce(want.unit, want.uses), offer, f"the reduction of unit {want.name}")

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        return self._aside.put(key, parts)

    def arrived(self, key: Key, src: int) -> bool:
        return self._aside.arrived(key, src)

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        return self._aside.take(key, src, unit)

    def discard_parts(self) -> None:
        self._aside.discard_parts()

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
            return [position] * self.world
        return self._aside.meet(position)

    # ---- failure
    def check(self) -> None:
        self._aside.check()

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._aside.fail(text, cause)

    def shared_fate(self, what: str) -> AbstractContextManager[None]:
        return self._aside.shared_fate(what)
