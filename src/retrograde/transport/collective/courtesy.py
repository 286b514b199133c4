"""Calls in which this rank takes part for the others' sake.

[Note: courtesy calls]
A rank that is OUT (transport/order) is served one-sidedly, and others wait for it in calls. So it issues them too:

| call             | it brings                         | and gets                                           |
|------------------|-----------------------------------|----------------------------------------------------|
| a gather         | its shard, which is at rest       | a page, thrown away, or kept if it is a spare      |
| an exchange      | nothing, which is told from zeros | the others' parts of its shard: as if put by them  |
| a backend's sum  | zeros                             | the others' sum for its shard                      |

Rule 1: nothing is a part of which every byte is 0xFF: a NaN that no arithmetic makes, in every element. So an owner
        that sees parts apart knows who is absent, and adds up when the late ones are there.
Rule 2: memory of a call lives until it has been waited for by whoever finds it done.
Rule 3: on a device all this is done on the serving stream, which waits for nothing but what last wrote the shard. What
        came of gradients is brought to the host's memory. The host waits for these calls before ranks go on from a
        meeting, so whoever writes the shard next comes after them.
Rule 4: where a reduction is two calls (replicas.py), a stream waits for other ranks between them. It is one of its own:
        what is served one-sidedly must not wait for those who ask for it, nor what came for calls that follow.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from retrograde.devices import Stream, Streams, another_stream
from retrograde.transport.collective.communicator import CallWork, ExchangeOffer, GatherOffer, SumOffer
from retrograde.transport.collective.labels import ReductionLabel
from retrograde.transport.collective.replicas import (
    AnyOffer,
    MeshCommunicator,
    TwoStepOffer,
    sum_in_two_steps,
)
from retrograde.transport.messages import Key
from retrograde.transport.order import Gather, Reduce, Want
from retrograde.transport.protocol import CourtesySum, GatheredShards

_NOTHING = 0xFF
_SUMMAND = 0x00  # every byte of a part that changes no sum


def is_absent(part: torch.Tensor) -> bool:
    """Does every byte of this part say that its rank was absent (Rule 1)? The first element decides in all but the
    strangest cases, so that looking costs nothing. A part without elements is the same, absent or not."""
    if not part.numel():
        return False
    first = part[:1].view(torch.uint8)
    return bool((first == _NOTHING).all()) and bool((part.view(torch.uint8) == _NOTHING).all())


def present_parts(received: torch.Tensor, world: int) -> dict[int, torch.Tensor]:
    """The parts that came from ranks that were not absent, by their place in `received`."""
    rows = enumerate(received.view(world, received.numel() // world).unbind())
    return {rank: part for rank, part in rows if not is_absent(part)}


def parts_by_rank(received: torch.Tensor, ranks: Sequence[int]) -> dict[int, torch.Tensor]:
    """The parts that came from these ranks, in this order, without those of absent ones."""
    return {ranks[place]: part for place, part in present_parts(received, len(ranks)).items()}


def spread_absence(received: torch.Tensor, size: int, total: torch.Tensor) -> None:
    """Make `total`, the sum of the parts in `received`, absent if one of them is.
    On a device the host does not look."""
    if received.is_cpu:
        if len(present_parts(received, size)) < size:
            total.view(torch.uint8).fill_(_NOTHING)
    elif received.numel():
        absent = received.view(torch.uint8).view(size, -1).amin(1).eq(_NOTHING).any()
        total.view(torch.uint8).masked_fill_(absent, _NOTHING)


def first_bytes(received: torch.Tensor, world: int) -> torch.Tensor:
    """The bytes of the first element of every rank's part, one after the other: enough to see in all but the strangest
    cases that nobody is absent."""
    return received.view(world, received.numel() // world)[:, :1].contiguous().view(torch.uint8).flatten()


def first_size(received: torch.Tensor, world: int) -> int:
    return world * received.itemsize if received.numel() else 0


def looks_absent(firsts: torch.Tensor, world: int) -> bool:
    """Could somebody be absent, by what `first_bytes` gives?"""
    return bool(firsts.numel()) and bool((firsts.view(world, -1) == _NOTHING).all(1).any())


class SparePage(NamedTuple):
    """A page that came before this rank's program wanted it.
    Implements `Work` for whoever wants it now, and is waited for once."""

    work: CallWork
    page: torch.Tensor
    wanted: GatherOffer | None = None

    def wait(self, stream: Stream) -> None:
        self.work.wait(stream)
        assert self.wanted is not None, "nobody has wanted it yet"
        for place in self.wanted.written:
            into, came = self.wanted.page[place], self.page[place]
            stream.run(lambda into=into, came=came: into.copy_(came))  # type: ignore[misc]
        stream.hold(self.page)

    def done(self) -> bool:
        return False  # something is left to be issued


class _Attended(NamedTuple):
    key: Key
    label: ReductionLabel


class _Courtesy(NamedTuple):
    work: CallWork
    attended: _Attended | None
    received: torch.Tensor


class Courtesies:
    """The calls in which one rank takes part for the others' sake, and what they bring.
    Its callers hold the lock of the connections."""

    def __init__(self, communicator: MeshCommunicator, shards: GatheredShards, streams: Streams) -> None:
        self._communicator = communicator
        self._shards = shards
        self._streams = streams
        self._running: list[_Courtesy] = []
        self._stream = streams.serving
        self._reducing = self._stream if communicator.replicas == 1 else another_stream(streams.device)  # Rule 4
        self._scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # pages that nobody reads
        self._nothing: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}
        self._parts: dict[tuple[Key, int], torch.Tensor] = {}
        self._sums: list[CourtesySum] = []
        self._error: Exception | None = None

    # ---- calls
    def attend(self, want: Want, meeting: int) -> CallWork:
        """Take part in what others want. `meeting`: the last one before it."""
        match want:
            case Gather():
                offer = self._gather(want.unit)
                return self._start(offer, None, offer.page)
            case Reduce():
                label = ReductionLabel.read(want)
                return self._reduce(want.unit, _Attended(label.key(want.unit, meeting), label))

    def fetch(self, want: Gather) -> tuple[CallWork, torch.Tensor]:
        """Take part in a gather that others want, and keep its page. Returns the call and the page."""
        shard = self._shard(want.unit)
        page = self._stream.empty(shard.numel() * self._communicator.size, shard.dtype)
        return self._start(GatherOffer(shard, page, self._stream), None, page), page

    def _gather(self, unit: int) -> GatherOffer:
        shard = self._shard(unit)
        form = (shard.numel() * self._communicator.size, shard.dtype)
        if form not in self._scratch:
            self._scratch[form] = self._stream.empty(*form)
        return GatherOffer(shard, self._scratch[form], self._stream)

    def _shard(self, unit: int) -> torch.Tensor:
        """A unit's shard where calls can take it from: with offload it may be in the host's memory, and is copied."""
        shard = self._shards.shard_to_gather(unit)
        if shard.device.type == self._streams.device.type:
            return shard
        copied = self._stream.empty(shard.numel(), shard.dtype)
        self._stream.run(lambda: copied.copy_(shard, non_blocking=True))
        return copied

    def _reduce(self, unit: int, attended: _Attended) -> CallWork:
        numel, dtype = self._shards.shard_numel(unit), attended.label.travels_as
        whole = numel * self._communicator.size
        stream = self._reducing
        if attended.label.apart:
            received = stream.empty(whole, dtype)
            parts = self._filled(whole, dtype, _NOTHING)
            offer = self._exchange(ExchangeOffer(parts, received, stream), numel, attended.label.sums_travel_as)
        else:
            received = stream.empty(numel, dtype)
            offer = self._sum(SumOffer(self._filled(whole, dtype, _SUMMAND), received, stream))
        return self._start(offer, attended, received)

    def _exchange(self, offer: ExchangeOffer, numel: int, dtype: torch.dtype) -> AnyOffer:
        """Make an exchange in which this rank is absent one of two steps, if there are several replicas: a replica
        without this rank has no sum for the others."""
        replicas = self._communicator.replicas
        if replicas == 1:
            return offer
        sums = offer.stream.empty(replicas * numel, dtype)
        return TwoStepOffer(offer, lambda: None, GatherOffer(self._filled(numel, dtype, _NOTHING), sums, offer.stream))

    def _sum(self, offer: SumOffer) -> AnyOffer:
        return offer if self._communicator.replicas == 1 else sum_in_two_steps(offer.whole, offer.total, offer.stream)

    def _filled(self, numel: int, dtype: torch.dtype, byte: int) -> torch.Tensor:
        form = (numel, dtype, byte)
        if form not in self._nothing:
            made = self._nothing[form] = self._reducing.empty(numel, dtype)
            self._reducing.run(lambda: made.view(torch.uint8).fill_(byte))
        return self._nothing[form]

    def _start(self, offer: AnyOffer, attended: _Attended | None, received: torch.Tensor) -> CallWork:
        work = self._communicator.start_aside(offer)
        self._running.append(_Courtesy(work, attended, received))
        return work

    # ---- their ends
    @property
    def done(self) -> bool:
        """Are all these calls done? Asked without the lock:
        a copy is looked at, since another thread may take out what it has collected."""
        return all(courtesy.work.done() for courtesy in list(self._running))

    def collect(self) -> None:
        """Finish the calls that are done, and keep what they brought of gradients."""
        for courtesy in [courtesy for courtesy in self._running if courtesy.work.done()]:
            self._running.remove(courtesy)
            try:
                courtesy.work.finish(self._stream)
                if courtesy.attended is not None:
                    self._take_in(courtesy.attended, self._stream.to_host(courtesy.received))
            except RuntimeError as error:  # of the backend. Who finds it may be a thread that nobody listens to
                self._error = error

    def _take_in(self, attended: _Attended, came: torch.Tensor) -> None:
        key, label = attended
        if label.apart:
            self.keep(key, parts_by_rank(came, self._communicator.owners))
        else:
            self._sums.append(CourtesySum(key, label.uses, came))

    def end_period(self) -> Exception | None:
        """Let go of the memory of a period, all of whose calls are done. Returns what went wrong in one."""
        self.collect()
        self._scratch.clear()
        self._nothing.clear()
        return self._error

    # ---- what came in calls and waits to be added up
    @property
    def has_sums(self) -> bool:
        return bool(self._sums)

    def take_sums(self) -> list[CourtesySum]:
        """Take the sums that have come, in the same order on all ranks that were absent."""
        taken, self._sums = self._sums, []
        return taken

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
