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

To add another way (in another precision, in blocks, compressed): another class with these methods, which the engine
chooses by transport and policy (engine/engine.py). What only travels in another dtype is `Precision.reduce`.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import torch

from retrograde.devices import Stream
from retrograde.gradients.bucket import Bucket
from retrograde.gradients.gradient import Gradient
from retrograde.gradients.landing import let_go_of_sum, memory_for_sum
from retrograde.gradients.sums import Summand, add_up, copy_together
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

    takes_pieces: bool  # may a bucket be in pieces, with gradients where autograd left them?
    buffers: int  # of the size of a bucket, that a gradient under way takes
    # As long as ranks do the same: is it known without a meeting that all of them have a gradient that was sent? Then
    # what waits is sent at places to which all ranks come, and no meeting has to ask for it.
    knows_contributors: bool
    # May a part of a sum come to `.grad` later than the rest, at the next meeting, if a rank has strayed? Then who
    # computes from `.grad` meets before, and a backward ends without one.
    comes_later: bool

    def launch(self, gradient: Gradient) -> None:
        """Start what can be started for a gradient that was just sent, before a meeting says who else has it. Go on
        with what was launched before, as far as that needs no waiting."""

    def contributors(self, gradient: Gradient) -> Contributors | None:
        """The ranks that have the gradient, with their uses, if that is known without a meeting; else None."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        """Add up the parts of the ranks in `offers`. The sum is in `gradient.own`."""

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        """Add up the parts of the ranks in `offers`, to which this rank has nothing to add."""

    def sums_of_others(self, units: Sequence[Unit]) -> Sequence[SumOfOthers]:
        """The sums that have come by calls in which this rank brought nothing, in the order of the calls."""

    def give_up(self, gradient: Gradient) -> None:
        """Forget a gradient: the backward that launched it raised."""

    def pass_step(self) -> None:
        """Forget what belongs to the step that ends: all ranks are at it, and all that was sent has been added up."""

    def withdrawn(self) -> Sequence[Key]:
        """The keys of gradients that this rank has given up although every rank had brought them. Each is returned
        once, and the next meeting fails unless all ranks have given it up."""

    def finish_sending(self) -> None:
        """Give back the memory of what has been sent. A strategy that sends bucket by bucket waits until that is so."""


class _ShardSum:
    """The sum for this rank's shard of one gradient: over this replica's ranks, then over replicas, if there are
    several. Each is added up when all its parts are there."""

    def __init__(self, unit: Unit, key: Key, own: torch.Tensor, mine: Summand) -> None:
        """`own`: where the result belongs. `mine`: this rank's part, in a bucket or in `own`."""
        self.unit = unit
        self.key = key
        self.own = own
        self.mine = mine
        self.ranks: Sequence[int] = ()  # whose parts have been added up
        self.replicas: Sequence[int] = ()
        self.of_replica: torch.Tensor | None = None  # its sum, as all replicas add it
        self.finished = False

    @property
    def in_bucket(self) -> bool:
        """Is this rank's part still to be read from the bucket?"""
        return not self.ranks and self.mine[0] is not self.own

    def finish(self) -> None:
        self.mine = ()
        self.of_replica = None
        self.finished = True


class _Sending(NamedTuple):
    work: Work
    bucket: Bucket
    shard: _ShardSum


class OrderedSum:
    """Implements `Strategy`: owners add up in rank order. Holds at most one bucket whose sending is not done.

    What comes from a rank of this replica is its part of this rank's shard; what comes from another holder of the
    shard is the sum of that holder's replica. So both go by the same key."""

    takes_pieces = True
    buffers = 1
    knows_contributors = False
    comes_later = False

    def __init__(self, transport: Transport, grid: Grid, policy: Policy, pool: BufferPool) -> None:
        self._transport = transport
        self._grid = grid
        self._policy = policy
        self._divisor = grid.world if policy.mean else 1
        self._streams = pool.streams
        self._sending: _Sending | None = None
        self._sums: dict[Key, _ShardSum] = {}  # until somebody asks for their totals
        self._waiting: dict[Key, _ShardSum] = {}  # of these, for parts of others
        self._given_up: set[Key] = set()  # after they had been added up: others' parts of them are gone

    def contributors(self, gradient: Gradient) -> Contributors | None:
        return None

    def launch(self, gradient: Gradient) -> None:
        """Put the parts of all other owners to them. This rank's own part stays in the bucket until it is added to the
        others', or until the next gradient is sent."""
        self.finish_sending()
        bucket = gradient.bucket
        wire = self._policy.on_the_wire(bucket.dtype)
        theirs = {owner.rank: bucket.parts(owner.shard) for owner in self._grid.other_owners}
        works: list[Work] = []

        def send() -> None:
            parts = {dst: [part.to(wire) for part in pieces] for dst, pieces in theirs.items()}
            works.append(self._transport.put(gradient.key, parts))

        with labelled("send gradient of", gradient.unit.name):
            self._streams.reducing.run(send)
        self._advance_waiting()
        shard = self._begin(gradient, bucket.parts(self._grid.shard))
        if wire != bucket.dtype:
            self._leave_bucket(shard)  # it is rounded as the others' are
        self._sending = _Sending(_All(works), bucket, shard)

    def take_over(self, gradient: Gradient, mine: torch.Tensor) -> None:
        """Begin the sum of a gradient whose parts come by another way than `put`.
        `mine`: this rank's own part, as the others have it."""
        place = self._place_of(mine.dtype, gradient.own)
        self._streams.reducing.run(lambda: place.copy_(mine))
        self._begin(gradient, [place])

    def _begin(self, gradient: Gradient, mine: Summand) -> _ShardSum:
        shard = _ShardSum(gradient.unit, gradient.key, gradient.own, mine)
        self._sums[gradient.key] = self._waiting[gradient.key] = shard
        return shard

    def finish_sending(self) -> None:
        if self._sending is None:
            return
        sending, self._sending = self._sending, None
        stream = self._streams.reducing
        sending.work.wait(stream)
        if sending.shard.key in self._waiting:  # else it is finished, or was given up
            self._advance(sending.shard)
            if sending.shard.in_bucket:
                self._leave_bucket(sending.shard)
        sending.bucket.release(stream.record())

    def _leave_bucket(self, shard: _ShardSum) -> None:
        """Copy this rank's part out of the bucket, rounded as the other ranks' parts are."""
        wire = self._policy.on_the_wire(shard.mine[0].dtype)
        place = self._place_of(wire, shard.own)
        self._streams.reducing.run(partial(copy_together, shard.mine, place, wire))
        shard.mine = [place]

    def _place_of(self, wire: torch.dtype, own: torch.Tensor) -> torch.Tensor:
        """Memory for a part that waits: `own`, where the sum will be, if its dtype can hold what has travelled, else
        new memory. Whether a part has waited must not change the sum."""
        if torch.promote_types(wire, own.dtype) == own.dtype:
            return own
        return self._streams.reducing.empty(own.numel(), wire)

    # ---- before a meeting: what is complete is added up. Else all parts would be held till the end of the backward
    def _advance_waiting(self) -> None:
        for shard in list(self._waiting.values()):
            self._advance(shard)

    def _advance(self, shard: _ShardSum) -> None:
        if not shard.ranks and self._are_here(shard.key, self._grid.owners):
            self._add_ranks(shard, self._grid.owners)
        if shard.ranks and not shard.finished and self._are_here(shard.key, self._grid.holders):
            self._add_replicas(shard, range(self._grid.replicas))
        if shard.finished:
            del self._waiting[shard.key]

    def _are_here(self, key: Key, ranks: Sequence[int]) -> bool:
        return all(rank == self._transport.rank or self._transport.arrived(key, rank) for rank in ranks)

    # ---- sums
    def _add_ranks(self, shard: _ShardSum, ranks: Sequence[int]) -> None:
        """Add up the parts of this replica's ranks. If there are other replicas, send them the sum."""
        parts = [self._part(shard, rank) for rank in ranks]
        shard.ranks = ranks
        stream = self._streams.reducing
        if self._grid.replicas == 1:
            add_up(parts, shard.own, self._divisor, stream)
            shard.finish()
            return
        wide = torch.promote_types(shard.own.dtype, torch.float32)
        total = shard.own if shard.own.dtype == wide else stream.empty(shard.own.numel(), wide)
        add_up(parts, total, 1, stream)
        shard.of_replica = self._send_to_replicas(shard, total)

    def _part(self, shard: _ShardSum, rank: int) -> Summand:
        if rank == self._transport.rank:
            return shard.mine
        return [self._transport.take(shard.key, rank, shard.unit.name)]

    def _send_to_replicas(self, shard: _ShardSum, total: torch.Tensor) -> torch.Tensor:
        """Put this replica's sum to the other holders of the shard.
        Returns it as they get it, since it must count so here."""
        stream = self._streams.reducing
        sent = stream.empty(total.numel(), self._policy.between_replicas(shard.own.dtype))
        parts = {holder: [sent] for holder in self._grid.other_holders}
        with labelled("send sum of", shard.unit.name):
            stream.run(lambda: sent.copy_(total))  # `total` stays: others' are added to it
            stream.run(lambda: self._transport.put(shard.key, parts))
        return sent if sent.dtype != total.dtype else total

    def _add_replicas(self, shard: _ShardSum, replicas: Sequence[int]) -> None:
        parts = [self._part_of_replica(shard, replica) for replica in replicas]
        shard.replicas = replicas
        add_up(parts, shard.own, self._divisor, self._streams.reducing)
        shard.finish()

    def _part_of_replica(self, shard: _ShardSum, replica: int) -> Summand:
        if replica == self._grid.replica:
            assert shard.of_replica is not None
            return [shard.of_replica]
        return [self._transport.take(shard.key, self._grid.holders[replica], shard.unit.name)]

    # ---- after a meeting
    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        self._waiting.pop(gradient.key, None)
        return self._complete(self._sums.pop(gradient.key), offers)

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        if key in self._given_up:
            self._transport.fail(
                f"rank {self._transport.rank}: it gave up a backward after the gradients of unit {unit.name} had been "
                f"added up, and rank {min(offers)} did not; let all ranks give up a backward, or none"
            )
        own = memory_for_sum(unit, self._streams)
        return self._complete(_ShardSum(unit, key, own, ()), offers)

    def _complete(self, shard: _ShardSum, offers: Contributors) -> torch.Tensor:
        replicas = self._grid.replicas_of(offers)
        self._check_nothing_given_up(shard, offers, replicas)
        with labelled("sum of gradient of", shard.unit.name):
            ranks = [rank for rank in self._grid.owners if rank in offers]
            if ranks and not shard.ranks:
                self._add_ranks(shard, ranks)
            if not shard.finished:
                self._add_replicas(shard, replicas)
        self._streams.current().wait(self._streams.reducing.record())
        return shard.own

    def _check_nothing_given_up(self, shard: _ShardSum, offers: Contributors, replicas: Collection[int]) -> None:
        """Fail if a rank or a replica no longer offers a part that has been added up already."""
        given_up = [rank for rank in shard.ranks if rank not in offers]
        given_up += [self._grid.holders[each] for each in shard.replicas if each not in replicas]
        if given_up:
            fail_given_up(self._transport, given_up[0], shard.unit)

    def give_up(self, gradient: Gradient) -> None:
        if self._sums.pop(gradient.key).ranks:
            self._given_up.add(gradient.key)
        self._waiting.pop(gradient.key, None)
        let_go_of_sum(gradient.unit, self._streams)

    def sums_of_others(self, units: Sequence[Unit]) -> Sequence[SumOfOthers]:
        """There are none: nothing comes by calls."""
        return ()

    def pass_step(self) -> None:
        self._given_up.clear()

    def withdrawn(self) -> Sequence[Key]:
        """There are none: a part counts only if it is on offer at the meeting."""
        return ()


class _All:
    """Several works as one. The list may still grow, by works that a stream has yet to issue."""

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
