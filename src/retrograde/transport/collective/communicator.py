"""Calls of collectives, on a process group of our own: the user's collectives may come between ours in any order."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from retrograde.devices import Stream, Streams, another_stream
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.own_groups import Calls, own_group

POLL = 0.0002  # seconds between two looks at a call that the host waits for
LARGE = 2**18  # bytes of a shard in the host's memory, from which on copying it takes longer than a call


def broadcast_each(shard: torch.Tensor, page: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """A gather in the host's memory: a broadcast of each shard, straight into its place in the page.

    torch's all-gather over gloo makes a page of its own first, in fresh memory, and copies it."""
    places = page.chunk(group.size())
    mine = places[group.rank()]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)
    return [
        _started(dist.broadcast(place, group=group, group_src=owner, async_op=True))
        for owner, place in enumerate(places)
    ]


def is_done(work: dist.Work) -> bool:
    """Is a call in the host's memory done?

    Its future is asked: `is_completed()` waits, with the interpreter's lock held, for a lock under which the backend's
    thread may want the interpreter's (where a profiler runs, and the call was issued under saved-tensor hooks)."""
    return bool(work.get_future().done())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


class GatherOffer(NamedTuple):
    """What this rank brings to the gather of a unit: its shard, and room for all of them."""

    shard: torch.Tensor
    page: torch.Tensor
    stream: Stream  # on which both may be used

    @property
    def written(self) -> list[slice]:
        """Which elements of the page a gather writes: not those of a shard that lies in its place there."""
        first = (self.shard.data_ptr() - self.page.data_ptr()) // self.page.itemsize
        if not 0 <= first < self.page.numel():
            return [slice(None)]
        return [slice(0, first), slice(first + self.shard.numel(), None)]

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        if self.shard.is_cpu and self.shard.nbytes >= LARGE:
            return broadcast_each(self.shard, self.page, group)
        return [_started(dist.all_gather_single(self.page, self.shard, group=group, async_op=True))]


class ExchangeOffer(NamedTuple):
    """What this rank brings to an exchange:
    for each rank its part of a gradient, and room for what each has of this rank's."""

    parts: torch.Tensor
    received: torch.Tensor
    stream: Stream

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        return [_started(dist.all_to_all_single(self.received, self.parts, group=group, async_op=True))]


class SumOffer(NamedTuple):
    """A gradient that the backend adds up; this rank's part of the sum goes to `total`."""

    whole: torch.Tensor
    total: torch.Tensor
    stream: Stream

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        return [_started(dist.reduce_scatter_single(self.total, self.whole, group=group, async_op=True))]


class TotalOffer(NamedTuple):
    """Memory in which the backend adds up what the ranks of a group have there, on all of them."""

    total: torch.Tensor
    stream: Stream

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        return [_started(dist.all_reduce(self.total, group=group, async_op=True))]


Offer = GatherOffer | ExchangeOffer | SumOffer | TotalOffer


class CallWork:
    """A call under way in the host's memory. Implements `Work`. It has the call's memory until it has been waited for.

    It is the host that waits, once, since gloo would write the results again."""

    in_order = False  # does the next call of the communicator begin when this one has ended?

    def __init__(self, works: list[dist.Work], offer: Offer, host: OneSidedTransport, calls: Calls) -> None:
        """`host`: knows whether another rank has failed. `calls`: those of its group."""
        self._calls = calls
        self._number = calls.begin()
        self._works = works
        self._offer: Offer | None = offer
        self._host = host
        self._waits_since: float | None = None
        self.what = "a collective"  # for whoever waits for it in vain
        self.patience = math.inf  # seconds for which other ranks are waited for

    def wait(self, stream: Stream) -> None:
        if self._offer is None:
            return
        if not self.done():
            self._waits_since = time.monotonic()
            self.wait_on_host()
            self._waits_since = None
        try:
            self.finish(stream)
        except RuntimeError as error:
            self._host.fail_of_backend(self.what, error)

    def wait_on_host(self) -> None:
        """Make the host wait until the call is done. Making a stream wait is left to `finish`."""
        others = list(self._host.connections.peers)
        self._host.wait_for(lambda: [] if self.done() else others, self.what, look_again=POLL)

    def finish(self, stream: Stream) -> None:
        """Make `stream` wait for the call, which is done, and let go of its memory."""
        works, self._works = self._works, []  # the program does the rest, or the watch, and not both
        if works:
            for work in works:
                stream.run(work.wait)
            self._calls.end(self._number)
            self._offer = None

    def done(self) -> bool:
        return all(map(is_done, self._works))

    def is_young(self, now: float) -> bool:
        """Is it too early to look at the call?"""
        return False

    def is_overdue(self, now: float) -> bool:
        """Has the program waited too long for the call, which is not done?"""
        return self._waits_since is not None and now - self._waits_since >= self.patience


class DeviceCall(CallWork):
    """A call under way on a device. Each stream that uses its results waits for it. It may be under way for long after
    that, and has nothing but two events then: a backend's own object would keep the results alive."""

    in_order = True

    def __init__(
        self, works: list[dist.Work], offer: Offer, host: OneSidedTransport, calls: Calls, ends: Stream
    ) -> None:
        """`ends`: the communicator's stream, which waits for one call after the other and does nothing else."""
        super().__init__([], offer, host, calls)
        self._issued = time.monotonic()
        self._stream = offer.stream
        self._behind = offer.stream.record()  # the call begins when what was issued before it is done
        for work in works:
            ends.run(work.wait)
        self._ends = ends
        self._ended = ends.record()

    def begin_with(self, first: "DeviceCall") -> None:
        """Be one call with `first`, whose results this one takes, to whoever watches them."""
        self._issued = first._issued
        self._behind = first._behind

    def wait(self, stream: Stream) -> None:
        self.finish(stream)

    def finish(self, stream: Stream) -> None:
        stream.wait(self._ended)
        self._calls.end(self._number)
        self._offer = None

    def done(self) -> bool:
        return self._ends.has_passed(self._ended)

    def is_young(self, now: float) -> bool:
        """Is it too early to look at the call?
        A look that finds it done orders what is issued after it, and could hide that nobody waits."""
        return now - self._issued < self.patience

    def is_overdue(self, now: float) -> bool:
        """Has the call been incomplete for too long since the device came to it? From then on whoever waits for the
        device waits for other ranks."""
        if self._waits_since is None and self._stream.has_passed(self._behind):
            self._waits_since = now
        return super().is_overdue(now)


class Communicator:
    """Calls on a process group with the ranks and backends of the user's, or with a part of its ranks.
    All ranks make it together."""

    def __init__(self, host: OneSidedTransport, streams: Streams, rows: Sequence[Sequence[int]]) -> None:
        """`rows`: the ranks of each group: of each replica, by shard, or of the holders of each shard."""
        self._own = own_group(rows, host.rank, host.connections.group(), host.timeout, host.tell_all)
        self.size = len(rows[0])
        self._host = host
        self._ends = None if streams.on_host else another_stream(streams.device)
        self._overlap = streams.overlap

    def start(self, offer: Offer) -> CallWork:
        """Issue a call on the offer's stream: it begins when what was issued there is done. Without overlap the stream
        waits for it at once."""
        work = self.start_aside(offer)
        if not self._overlap:
            work.wait(offer.stream)
        return work

    def start_aside(self, offer: Offer) -> CallWork:
        """Issue a call as `start` does, on a stream that has something else to do meanwhile:
        it never waits for the call."""
        started = self.issue(offer)
        if self._ends is None:
            return CallWork(started, offer, self._host, self.calls)
        return DeviceCall(started, offer, self._host, self.calls, self._ends)

    def issue(self, offer: Offer) -> list[dist.Work]:
        """Issue a call to the backend, and do nothing else."""
        started: list[dist.Work] = []
        offer.stream.run(lambda: started.extend(offer.start(self._own.group)))
        return started

    @property
    def calls(self) -> Calls:
        return self._own.calls
