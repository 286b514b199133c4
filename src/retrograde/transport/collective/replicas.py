"""Calls of a rank where there may be several replicas of the model: among its replica's ranks, and among holders.

[Note: calls of two steps]
With replicas (layout/grid.py) a gradient is added up among the ranks of each replica, and these sums among the ranks
that hold the same shard. So a reduction is two calls, on two process groups, and the second takes what the first
brings. To the order of collectives (transport/order) both are one call.

    rank 0 ── first ──> its replica's sum of shard 0 ── second ──> the sum of shard 0
    rank 1 ── first ──> its replica's sum of shard 1 ── second ──> the sum of shard 1

Rule 1: on each group all ranks issue the same calls in the same order. First calls are issued in the order that all
        ranks share, and second ones in the order of their first.
Rule 2: on a device a stream waits for the first call, and both are issued at once. So both groups have one order.
Rule 3: in the host's memory somebody waits, and nobody may wait where calls are issued. So a second call stands in a
        line until the first is done and those before it in the line have been issued. Then whoever comes by issues it:
        the program when it waits for a call or issues another, or else the watch. Nobody does so with the lock of the
        connections held, since the sums between two calls take their time.
Rule 4: a first call that fails takes with it all that stand in line behind it: what they would bring, or go with, would
        be another gradient's.
Rule 5: if a rank brought nothing to the first call, its replica has no sum; then each rank of that replica brings
        nothing to the second, which is told from zeros (courtesy.py, Rule 1). So all ranks of all replicas see it. (A
        backend's sum does not show it: there zeros go on, and what the absent put comes on top.)
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from retrograde.devices import Stream, Streams
from retrograde.transport.collective.communicator import (
    POLL,
    CallWork,
    Communicator,
    DeviceCall,
    ExchangeOffer,
    GatherOffer,
    Offer,
    SumOffer,
    TotalOffer,
)
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.own_groups import Calls


class TwoStepOffer(NamedTuple):
    """Two calls, of which the second takes what the first brings. `between` issues, on the stream of both, what makes
    the second's tensors of the first's."""

    first: ExchangeOffer | SumOffer
    between: Callable[[], None]
    second: GatherOffer | TotalOffer

    @property
    def stream(self) -> Stream:
        return self.first.stream


AnyOffer = Offer | TwoStepOffer


def sum_in_two_steps(whole: torch.Tensor, total: torch.Tensor, stream: Stream) -> TwoStepOffer:
    """Offer a gradient that the backend adds up in its own order, within each replica and then between replicas."""
    return TwoStepOffer(SumOffer(whole, total, stream), lambda: None, TotalOffer(total, stream))


class LaterCall(CallWork):
    """The second call of two, in the host's memory: it is issued when the first is done (Rule 3)."""

    def __init__(
        self,
        first: CallWork,
        offer: TwoStepOffer,
        issue: Callable[[Offer], list[dist.Work]],
        host: OneSidedTransport,
        calls: Calls,
    ) -> None:
        super().__init__([], offer.second, host, calls)
        self._first = first
        self._steps: TwoStepOffer | None = offer
        self._issue = issue
        self._line: Line | None = None
        self._error: Exception | None = None

    # ---- of one that stands in a line
    def stand_in(self, line: "Line") -> None:
        self._line = line

    @property
    def is_due(self) -> bool:
        return self._first.done()

    def go_on(self) -> None:
        """Issue the second call: the first is done."""
        assert self._steps is not None
        self._first.finish(self._steps.stream)
        self._steps.between()
        self._works = self._issue(self._steps.second)
        self._steps = None

    def fail(self, error: Exception) -> None:
        """Note that there will be no second call: whoever waits for it is told."""
        self._error = error
        self._steps = None

    # ---- `CallWork`
    def wait_on_host(self) -> None:
        while self._steps is not None:
            assert self._line is not None
            self._line.wait_for_first(lambda: self._steps is None, self.what)
        if self._error is None:
            super().wait_on_host()

    def finish(self, stream: Stream) -> None:
        if self._error is not None:
            raise RuntimeError(f"{self.what}: the sum of this replica's ranks failed") from self._error
        super().finish(stream)

    def done(self) -> bool:
        return self._steps is None and (self._error is not None or super().done())


class Line:
    """Second calls that have yet to be issued, in their order."""

    def __init__(self, host: OneSidedTransport) -> None:
        self._host = host
        self._calls: deque[LaterCall] = deque()
        self._advancing = threading.Lock()
        self._error: Exception | None = None

    def add(self, call: LaterCall) -> None:
        """Put a second call, whose first has just been issued, at the end of the line."""
        call.stand_in(self)
        self._calls.append(call)

    @property
    def is_due(self) -> bool:
        """May the first in the line be issued?"""
        try:
            return self._calls[0].is_due
        except IndexError:
            return False  # there is none, or another thread has just issued it

    def advance(self) -> None:
        """Issue what is due. The lock of the connections must not be held."""
        if not self._calls:
            return
        with self._advancing:
            while self.is_due:
                self._issue_or_fail(self._calls[0])
                self._calls.popleft()

    def _issue_or_fail(self, call: LaterCall) -> None:
        if self._error is None:
            try:
                call.go_on()
            except Exception as error:  # of the backend: told to whoever waits for a call, not to who came by
                self._error = error
        if self._error is not None:
            call.fail(self._error)  # Rule 4

    def wait_for_first(self, over: Callable[[], bool], what: str) -> None:
        """Wait until the first in the line is due, or `over()`;
        then issue what is due, unless another thread has done so."""
        others = list(self._host.connections.peers)
        self._host.wait_for(lambda: [] if over() or self.is_due else others, what, look_again=POLL)
        self.advance()


class MeshCommunicator:
    """The calls of one rank: on the group of its replica's ranks and, if there are several replicas, on that of the
    holders of its shard."""

    def __init__(self, host: OneSidedTransport, streams: Streams, rows: Sequence[Sequence[int]]) -> None:
        """`rows`: the ranks of each replica, by shard. All ranks make it together."""
        self._host = host
        self._on_host = streams.on_host
        self._owners = Communicator(host, streams, rows)
        columns = [list(column) for column in zip(*rows, strict=True)]
        self._holders = Communicator(host, streams, columns) if len(rows) > 1 else None
        self.owners: Sequence[int] = next(row for row in rows if host.rank in row)  # the ranks of this replica
        self.replicas = len(rows)
        self.line = Line(host)

    @property
    def size(self) -> int:
        """How many ranks this replica has."""
        return len(self.owners)

    def start(self, offer: AnyOffer) -> CallWork:
        """Issue a call on the offer's stream: it begins when what was issued there is done. Without overlap the stream
        waits for it at once."""
        return self._start(offer, Communicator.start)

    def start_aside(self, offer: AnyOffer) -> CallWork:
        """Issue a call as `start` does, on a stream that has something else to do meanwhile."""
        return self._start(offer, Communicator.start_aside)

    def _start(self, offer: AnyOffer, start: Callable[[Communicator, Offer], CallWork]) -> CallWork:
        if not isinstance(offer, TwoStepOffer):
            return start(self._owners, offer)
        assert self._holders is not None, "there is one replica"
        first = start(self._owners, offer.first)
        if self._on_host:
            call = LaterCall(first, offer, self._holders.issue, self._host, self._holders.calls)
            self.line.add(call)
            return call
        first.finish(offer.stream)
        offer.between()
        second = start(self._holders, offer.second)
        assert isinstance(first, DeviceCall)
        assert isinstance(second, DeviceCall)
        second.begin_with(first)
        return second
