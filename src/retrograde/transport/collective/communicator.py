"""Calls of collectives, on a process group of our own: the user's collectives may come between ours in any order."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from retrograde.devices import Stream, Streams
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.own_groups import Calls, own_group

POLL = 0.0002  # seconds between two looks at a call that the host waits for


class GatherOffer(NamedTuple):
    """What this rank brings to the gather of a unit: its shard, and room for all of them."""

    shard: torch.Tensor
    page: torch.Tensor
    stream: Stream  # on which both may be used

    def start(self, group: dist.ProcessGroup) -> Any:
        return dist.all_gather_single(self.page, self.shard, group=group, async_op=True)


class ExchangeOffer(NamedTuple):
    """To each rank its part of a gradient; from each rank what it has of this rank's."""

    parts: torch.Tensor
    received: torch.Tensor
    stream: Stream

    def start(self, group: dist.ProcessGroup) -> Any:
        return dist.all_to_all_single(self.received, self.parts, group=group, async_op=True)


class SumOffer(NamedTuple):
    """A gradient that the backend adds up; this rank's part of the sum goes to `total`."""

    whole: torch.Tensor
    total: torch.Tensor
    stream: Stream

    def start(self, group: dist.ProcessGroup) -> Any:
        return dist.reduce_scatter_single(self.total, self.whole, group=group, async_op=True)


Offer = GatherOffer | ExchangeOffer | SumOffer


class CallWork:
    """A call under way. Implements `Work`. Waited for once: gloo would write the results again.

    It has the call's memory until then."""

    def __init__(self, work: dist.Work, offer: Offer, host: OneSidedTransport, on_host: bool, calls: Calls) -> None:
        """`host`: who knows whether another rank has failed; `on_host`: whether it is the host that has to wait;
        `calls`: of its group."""
        self._calls = calls
        self._number = calls.begin()
        self._work: dist.Work | None = work
        self._offer: Offer | None = offer
        self._host = host
        self._on_host = on_host
        self.what = "a collective"  # for whoever waits for it in vain
        self.waits_since: float | None = None  # the program does

    def wait(self, stream: Stream) -> None:
        """On an accelerator it is the stream that waits."""
        if self._work is None:
            return
        if self._on_host and not self.done():
            self.waits_since = time.monotonic()
            others = list(self._host.connections.peers)
            self._host.wait_for(lambda: [] if self.done() else others, self.what, look_again=POLL)
            self.waits_since = None
        self.finish(stream)

    def finish(self, stream: Stream) -> None:
        """The same, of one that is done, or where it is the stream that waits."""
        work, self._work = self._work, None  # the program, or the watch: not both
        if work is not None:
            stream.run(work.wait)
            self._calls.end(self._number)
            self._offer = None

    def done(self) -> bool:
        work = self._work
        return work is None or bool(work.is_completed())


class Communicator:
    """A process group with the ranks and backends of the user's, or with one replica's. All ranks make it together."""

    def __init__(self, host: OneSidedTransport, streams: Streams, rows: Sequence[Sequence[int]]) -> None:
        """`rows`: the ranks of each replica, by shard."""
        ranks = dist.get_process_group_ranks(host.connections.group())
        self._own = own_group(rows, host.rank, ranks, host.timeout, host.tell_all)
        self.size = len(rows[0])
        self._host = host
        self._on_host = streams.on_host
        self._overlap = streams.overlap

    def start(self, offer: Offer) -> CallWork:
        """On the offer's stream: the call begins when what was issued there is done. Without overlap the stream waits
        for it at once."""
        started: list[dist.Work] = []
        offer.stream.run(lambda: started.append(offer.start(self._own.group)))
        work = CallWork(started[0], offer, self._host, self._on_host, self._own.calls)
        if not self._overlap:
            work.wait(offer.stream)
        return work
