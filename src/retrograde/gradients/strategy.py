"""How the ranks' gradients of a unit become one sum: every rank gets that of its own shard.

[Note: exactness]
`OrderedSum`: every rank's part goes to its owner, who adds them up: ((g0 + g1) + g2) + ... in rank order, in fp32 or
wider whatever travelled, then one division by the world size for `reduce="mean"`. It does not depend on which parts
arrived first, so it is the same at every run and equal to playing the ranks one after the other in one process. A rank
without a gradient is left out. With replicas (layout/grid.py) each adds up its own ranks' gradients so, and the holders
of a shard exchange those sums and add them up in the order of replicas: (g0 + g1) + (g2 + g3). A replica without a
gradient is left out.
`CollectiveSum` (collective_sum.py) does the same by collectives, or on a device leaves the sum to the backend, in an
order of which it says nothing (a ring, on those that have one).

To add another way (in another precision, in blocks, compressed): another class with these methods.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import torch

from retrograde.devices import Event, Stream
from retrograde.gradients.bucket import Bucket
from retrograde.gradients.gradient import Gradient
from retrograde.gradients.landing import memory_for_sum
from retrograde.labels import labelled
from retrograde.layout import Grid, Policy
from retrograde.pages import BufferPool, Unit
from retrograde.transport import Key, Transport, Uses, Work

Contributors = Mapping[int, Uses]  # of one gradient: the ranks that have it, and what each does with it


class SumOfOthers(NamedTuple):
    """A reduced gradient of this rank's shard that only others have brought, and what they use it for."""

    unit: Unit
    uses: Uses
    total: torch.Tensor


class Strategy(Protocol):
    """How the ranks' gradients of a unit become one sum."""

    passes_through: bool  # may a bucket have gradients that lie where autograd left them?
    buffers: int  # of the size of a bucket, that a gradient under way takes
    # May a part of a sum come to `.grad` later than the rest, at the next meeting, if a rank has strayed? Then who
    # computes from `.grad` meets before, and a backward ends without one.
    comes_later: bool

    def launch(self, gradient: Gradient) -> None:
        """It was sent just now: start what can be started before a meeting says who else has it."""

    def contributors(self, gradient: Gradient) -> Contributors | None:
        """Who has it, where that is known without a meeting."""

    def advance(self, gradients: Sequence[Gradient]) -> None:
        """Go on with what was launched, as far as that needs no waiting."""

    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        """A meeting has said who has which gradients. `total` of each comes next, in the same order on all ranks."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        """The sum over the ranks that offer, in `gradient.own`."""

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        """The same where this rank has nothing to add."""

    def sums_of_others(self, units: Sequence[Unit], last: float) -> Sequence[SumOfOthers]:
        """What has come by calls in which this rank brought nothing, of backwards up to this one."""

    def give_up(self, gradient: Gradient) -> None:
        """The backward that launched it raised."""

    def withdrawn(self) -> Sequence[Key]:
        """What was given up since the last meeting, and the others have already: all ranks must have given it up, or
        none. Those that are returned are forgotten."""

    def finish_sending(self) -> None:
        """Wait until the memory of what is being sent is free."""


class RunningSum:
    """What has been added up so far, in order. Parts are folded in as they come and need not be kept."""

    def __init__(self, own: torch.Tensor, stream: Stream) -> None:
        """`own`: where the result belongs. It may be one of the parts."""
        self.own = own
        self.sources: list[int] = []  # ranks, or replicas
        self.finished = False
        self._stream = stream
        self._sum: torch.Tensor | None = None

    @property
    def sum(self) -> torch.Tensor:
        """In fp32 or wider."""
        assert self._sum is not None
        return self._sum

    def add(self, source: int, part: torch.Tensor) -> None:
        self.sources.append(source)
        wide = torch.promote_types(self.own.dtype, torch.float32)
        if self._sum is not None:
            self._stream.run(partial(self._sum.add_, part))
        elif part.dtype == wide:
            self._sum = part
        else:
            self._sum = self._stream.empty(part.numel(), wide)
            self._stream.run(partial(self._sum.copy_, part))

    def finish(self, divisor: int) -> None:
        """Nothing more will be added: the result takes its place."""
        own, total = self.own, self.sum
        if divisor == 1:
            if total is not own:
                self._stream.run(lambda: own.copy_(total))
        elif total.dtype == own.dtype:
            self._stream.run(lambda: torch.div(total, divisor, out=own))  # once through memory, not twice
        else:
            self._stream.run(lambda: own.copy_(total.div_(divisor)))
        self.forget()

    def forget(self) -> None:
        """What it was added up in is let go of: it may be as large as the result, or twice as large."""
        self._sum = None
        self.finished = True


class _ShardSum:
    """This rank's shard of one gradient, as far as it has been added up: over this replica's ranks, then over replicas.

    `mine` is this replica's sum, as all replicas add it, once the others have been sent it."""

    def __init__(self, unit: Unit, key: Key, own: torch.Tensor, stream: Stream) -> None:
        self.unit = unit
        self.key = key
        self.over_ranks = RunningSum(own, stream)
        self.over_replicas = RunningSum(own, stream)
        self.mine: torch.Tensor | None = None

    @property
    def finished(self) -> bool:
        return self.over_replicas.finished

    def finish(self, divisor: int) -> None:
        self.over_replicas.finish(divisor)
        self.over_ranks.forget()
        self.mine = None


class _Sending(NamedTuple):
    work: Work
    bucket: Bucket
    read: Event  # after what reads the bucket


class OrderedSum:
    """Implements `Strategy`. Holds at most one bucket whose sending is not done.

    What comes from a rank of this replica is its part of this rank's shard; what comes from another holder of the
    shard is the sum of that holder's replica. So both go by the same key."""

    passes_through = True
    buffers = 1
    comes_later = False

    def __init__(self, transport: Transport, grid: Grid, policy: Policy, pool: BufferPool) -> None:
        self._transport = transport
        self._grid = grid
        self._policy = policy
        self._divisor = grid.world if policy.mean else 1
        self._streams = pool.streams
        self._sending: _Sending | None = None
        self._sums: dict[Key, _ShardSum] = {}

    def contributors(self, gradient: Gradient) -> Contributors | None:
        return None

    def launch(self, gradient: Gradient) -> None:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        self.finish_sending()
        bucket, own = gradient.bucket, gradient.own
        stream = self._streams.reducing
        wire = self._policy.on_the_wire(bucket.dtype)
        mine = bucket.parts(self._grid.shard)
        theirs = {owner.rank: bucket.parts(owner.shard) for owner in self._grid.other_owners}
        works: list[Work] = []

        def send() -> None:
            parts = {dst: [part.to(wire) for part in pieces] for dst, pieces in theirs.items()}
            works.append(self._transport.put(gradient.key, parts))
            torch.cat([part.to(wire) for part in mine], out=own)

        with labelled("send gradient of", gradient.unit.name):
            stream.run(send)
        self._sending = _Sending(_All(works), bucket, stream.record())
        self.take_over(gradient)

    def take_over(self, gradient: Gradient) -> None:
        """Its parts have come, or will, by another way than `put`; this rank's own is in its place."""
        stream = self._streams.reducing
        self._sums[gradient.key] = _ShardSum(gradient.unit, gradient.key, gradient.own, stream)

    def finish_sending(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.work.wait(self._streams.reducing)
            sending.bucket.release(sending.read)

    # ---- before a meeting: what has come, as far as nothing before it is missing
    def advance(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            shard = self._sums[gradient.key]
            if not shard.finished and self._fold_ranks(shard) and self._fold_replicas(shard):
                shard.finish(self._divisor)  # not at the end of the backward: all units' would be held till then

    def _fold_ranks(self, shard: _ShardSum) -> bool:
        """Returns whether this replica's sum is complete."""
        for rank in self._grid.owners[len(shard.over_ranks.sources) :]:
            if not self._is_here(shard.key, rank):
                return False
            self._add_rank(shard, rank)
        return True

    def _fold_replicas(self, shard: _ShardSum) -> bool:
        """Returns whether the sum over all ranks is complete."""
        self._tell_replicas(shard)
        for replica in range(len(shard.over_replicas.sources), self._grid.replicas):
            if not self._is_here(shard.key, self._grid.holders[replica]):
                return False
            self._add_replica(shard, replica)
        return True

    def _is_here(self, key: Key, rank: int) -> bool:
        return rank == self._transport.rank or self._transport.arrived(key, rank)

    # ---- one part
    def _add_rank(self, shard: _ShardSum, rank: int) -> None:
        own = shard.over_ranks.own
        part = own if rank == self._transport.rank else self._transport.take(shard.key, rank, shard.unit.name)
        shard.over_ranks.add(rank, part)

    def _tell_replicas(self, shard: _ShardSum) -> None:
        """Put this replica's sum to the other holders of the shard, once. It counts here as it is sent."""
        if shard.mine is not None:
            return
        total = shard.mine = shard.over_ranks.sum
        if self._grid.replicas == 1:
            return
        stream = self._streams.reducing
        sent = stream.empty(total.numel(), self._policy.between_replicas(shard.over_ranks.own.dtype))
        parts = {holder: [sent] for holder in self._grid.other_holders}
        with labelled("send sum of", shard.unit.name):
            stream.run(lambda: sent.copy_(total))  # which goes on to be added to
            stream.run(lambda: self._transport.put(shard.key, parts))
        if sent.dtype != total.dtype:
            shard.mine = sent

    def _add_replica(self, shard: _ShardSum, replica: int) -> None:
        if replica == self._grid.replica:
            assert shard.mine is not None
            part = shard.mine
        else:
            part = self._transport.take(shard.key, self._grid.holders[replica], shard.unit.name)
        shard.over_replicas.add(replica, part)

    # ---- after a meeting
    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        """Nothing has to be started: parts are on their way."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        return self._complete(self._sums.pop(gradient.key), offers)

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        stream = self._streams.reducing
        own = memory_for_sum(unit, self._streams)
        return self._complete(_ShardSum(unit, key, own, stream), offers)

    def _complete(self, shard: _ShardSum, offers: Contributors) -> torch.Tensor:
        replicas = self._grid.replicas_of(offers)
        with labelled("sum of gradient of", shard.unit.name):
            for rank in self._grid.owners:
                if rank in offers and rank not in shard.over_ranks.sources:
                    self._add_rank(shard, rank)
            self._check_nothing_given_up(shard, offers, replicas)
            if not shard.finished:
                self._finish(shard, replicas)
        self._streams.current().wait(self._streams.reducing.record())
        return shard.over_ranks.own

    def _finish(self, shard: _ShardSum, replicas: Collection[int]) -> None:
        if shard.over_ranks.sources:
            self._tell_replicas(shard)
        for replica in replicas:
            if replica not in shard.over_replicas.sources:
                self._add_replica(shard, replica)
        shard.finish(self._divisor)

    def _check_nothing_given_up(self, shard: _ShardSum, offers: Contributors, replicas: Collection[int]) -> None:
        """What has been added up already is still on offer."""
        given_up = [rank for rank in shard.over_ranks.sources if rank not in offers]
        given_up += [self._grid.holders[each] for each in shard.over_replicas.sources if each not in replicas]
        if given_up:
            fail_given_up(self._transport, given_up[0], shard.unit)

    def give_up(self, gradient: Gradient) -> None:
        del self._sums[gradient.key]

    def sums_of_others(self, units: Sequence[Unit], last: float) -> Sequence[SumOfOthers]:
        """Every rank takes part in all there is."""
        return ()

    def withdrawn(self) -> Sequence[Key]:
        """A part counts only if it is on offer at the meeting."""
        return ()


class _All:
    """Several works as one. The list may still be filled by what was issued to a stream."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, stream: Stream) -> None:
        for work in self._works:
            work.wait(stream)

    def done(self) -> bool:
        return bool(self._works) and all(work.done() for work in self._works)


def fail_given_up(transport: Transport, rank: int, unit: Unit) -> NoReturn:
    transport.fail(
        f"rank {transport.rank}: rank {rank} gave up a backward in which it had already sent its gradient of unit "
        f"{unit.name}, and this rank did not; let all ranks give up a backward, or none"
    )
