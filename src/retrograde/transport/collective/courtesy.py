"""Calls in which this rank takes part for the others' sake.

[Note: courtesy calls]
A rank that is OUT (transport/order) is served one-sidedly, and others wait for it in calls. So it issues them too:

| call        | it brings                                | and gets                                           |
|-------------|------------------------------------------|----------------------------------------------------|
| a gather    | its shard, which is at rest              | a page, thrown away, or kept if it is a spare      |
| a reduction | nothing, which is told from zeros        | the others' parts of its shard: as if put by them  |

Rule 1: nothing is a part of which every byte is 0xFF: a NaN that no arithmetic makes, in every element. So an owner
        that sees parts apart knows who is absent, and adds up when the late ones are there.
Rule 2: memory of a call lives until it has been waited for, once, by whoever finds it done.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from retrograde.devices import Stream, Streams
from retrograde.transport.collective.communicator import CallWork, Communicator, ExchangeOffer, GatherOffer, Offer
from retrograde.transport.collective.labels import ReductionLabel
from retrograde.transport.messages import Key
from retrograde.transport.order import Gather, Reduce, Want
from retrograde.transport.protocol import GatheredShards

_NOTHING = 0xFF


def is_absent(part: torch.Tensor) -> bool:
    """Rule 1. The first element decides in all but the strangest cases, so that looking costs nothing. A part without
    elements is the same, absent or not."""
    if not part.numel():
        return False
    first = part[:1].view(torch.uint8)
    return bool((first == _NOTHING).all()) and bool((part.view(torch.uint8) == _NOTHING).all())


def present_parts(received: torch.Tensor, world: int) -> dict[int, torch.Tensor]:
    """What came from each rank that was not absent."""
    rows = enumerate(received.view(world, received.numel() // world).unbind())
    return {rank: part for rank, part in rows if not is_absent(part)}


class SparePage(NamedTuple):
    """A page that came before this rank's program wanted it. Implements `Work` for who wants it now."""

    work: CallWork
    page: torch.Tensor
    memory: torch.Tensor

    def wait(self, stream: Stream) -> None:
        self.work.wait(stream)
        stream.run(lambda: self.memory.copy_(self.page))

    def done(self) -> bool:
        return False  # something is left to be issued


class _Courtesy(NamedTuple):
    work: CallWork
    key: Key | None  # of a reduction
    received: torch.Tensor


class Courtesies:
    """One rank's. Its callers hold the lock of the connections."""

    def __init__(self, communicator: Communicator, shards: GatheredShards, streams: Streams) -> None:
        self._communicator = communicator
        self._shards = shards
        self._streams = streams
        self._running: list[_Courtesy] = []
        self._scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # pages that nobody reads
        self._nothing: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._parts: dict[tuple[Key, int], torch.Tensor] = {}
        self._error: Exception | None = None

    # ---- calls
    def attend(self, want: Want, meeting: int) -> None:
        """Take part in what others want. `meeting`: the last one before it."""
        match want:
            case Gather():
                offer = self._gather(want.unit)
                self._start(offer, None, offer.page)
            case Reduce():
                label = ReductionLabel.read(want)
                exchange = self._exchange(want.unit, label.travels_as)
                self._start(exchange, label.key(want.unit, meeting), exchange.received)

    def fetch(self, want: Gather) -> tuple[CallWork, torch.Tensor]:
        """The same of a gather, whose page is kept."""
        shard = self._shards.shard_to_gather(want.unit)
        page = torch.empty(shard.numel() * self._communicator.size, dtype=shard.dtype, device=shard.device)
        return self._start(GatherOffer(shard, page, self._streams.fetching), None, page), page

    def _gather(self, unit: int) -> GatherOffer:
        shard = self._shards.shard_to_gather(unit)
        form = (shard.numel() * self._communicator.size, shard.dtype)
        if form not in self._scratch:
            self._scratch[form] = torch.empty(form[0], dtype=form[1], device=shard.device)
        return GatherOffer(shard, self._scratch[form], self._streams.fetching)

    def _exchange(self, unit: int, dtype: torch.dtype) -> ExchangeOffer:
        form = (self._shards.shard_numel(unit) * self._communicator.size, dtype)
        if form not in self._nothing:
            self._nothing[form] = torch.empty(form[0], dtype=dtype, device="cpu")
            self._nothing[form].view(torch.uint8).fill_(_NOTHING)
        received = torch.empty(form[0], dtype=dtype, device="cpu")
        return ExchangeOffer(self._nothing[form], received, self._streams.reducing)

    def _start(self, offer: Offer, key: Key | None, received: torch.Tensor) -> CallWork:
        work = self._communicator.start(offer)
        self._running.append(_Courtesy(work, key, received))
        return work

    # ---- their ends
    @property
    def done(self) -> bool:
        return all(courtesy.work.done() for courtesy in self._running)

    def collect(self) -> None:
        """Wait for those that are done, and keep what came of gradients."""
        for courtesy in [courtesy for courtesy in self._running if courtesy.work.done()]:
            self._running.remove(courtesy)
            try:
                courtesy.work.finish(self._streams.current())
            except RuntimeError as error:  # of the backend. Who finds it may be a thread that nobody listens to
                self._error = error
                continue
            if courtesy.key is not None:
                self.keep(courtesy.key, present_parts(courtesy.received, self._communicator.size))

    def settle(self) -> None:
        """All calls of a period are done."""
        self.collect()
        if self._error is not None:
            raise self._error
        self._scratch.clear()
        self._nothing.clear()

    # ---- parts that came in calls and wait to be added up
    def keep(self, key: Key, parts: dict[int, torch.Tensor]) -> None:
        self._parts |= {(key, rank): part for rank, part in parts.items()}

    def has(self, key: Key, src: int) -> bool:
        return (key, src) in self._parts

    def take(self, key: Key, src: int) -> torch.Tensor:
        return self._parts.pop((key, src)).clone()  # its neighbours in memory may be let go of

    def discard_before(self, meeting: int) -> None:
        for at in list(self._old(meeting)):
            del self._parts[at]

    def _old(self, meeting: int) -> Iterator[tuple[Key, int]]:
        return (at for at in self._parts if at[0].meeting < meeting)
