"""How the ranks' gradients of a unit become one sum: every rank gets that of its own shard.

[Note: exactness]
`OrderedSum`: every rank's part goes to its owner, who adds them up: ((g0 + g1) + g2) + ... in rank order, in fp32 or
wider whatever travelled, then one division by the world size for `reduce="mean"`. It does not depend on which parts
arrived first, so it is the same at every run and equal to playing the ranks one after the other in one process. A rank
without a gradient is left out.
`BackendSum`: torch.distributed's reduce-scatter, in the backend's own order, of which it says nothing (a ring, on those
that have one). It starts as soon as all ranks have the gradient, while backward goes on.

To add another way (in another precision, in blocks, compressed): another class with these methods.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import torch

from retrograde.devices import Event, Stream
from retrograde.gradients.bucket import Bucket
from retrograde.gradients.gradient import Gradient
from retrograde.gradients.keys import FLUSHED
from retrograde.labels import labelled
from retrograde.layout import Policy
from retrograde.pages import BufferPool, Unit
from retrograde.transport import Key, Transport, Uses, Work

Contributors = Mapping[int, Uses]  # of one gradient: the ranks that have it, and what each does with it


class Strategy(Protocol):
    passes_through: bool  # may a bucket have gradients that lie where autograd left them?

    def launch(self, gradient: Gradient) -> None:
        """It was sent just now: start what can be started before a meeting says who else has it."""

    def advance(self, gradients: Sequence[Gradient]) -> None:
        """Go on with what was launched, as far as that needs no waiting."""

    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        """A meeting has said who has which gradients. `total` of each comes next, in the same order on all ranks."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        """The sum over the ranks that offer, in `gradient.own`."""

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        """The same where this rank has nothing to add."""

    def give_up(self, gradient: Gradient) -> None:
        """The backward that launched it raised."""

    def finish_sending(self) -> None:
        """Wait until the memory of what is being sent is free."""


class _RunningSum:
    """What has been added up so far, in rank order. Parts are folded in as they come and need not be kept."""

    def __init__(self, own: torch.Tensor, stream: Stream) -> None:
        self.ranks: list[int] = []
        self._own = own
        self._stream = stream
        self._sum: torch.Tensor | None = None

    def add(self, rank: int, part: torch.Tensor) -> None:
        self.ranks.append(rank)
        wide = torch.promote_types(self._own.dtype, torch.float32)
        if self._sum is not None:
            self._stream.run(partial(self._sum.add_, part))
        elif part.dtype == wide:
            self._sum = part
        else:
            self._sum = self._stream.empty(part.numel(), wide)
            self._stream.run(partial(self._sum.copy_, part))

    def finish(self, divisor: int) -> torch.Tensor:
        assert self._sum is not None
        own, total = self._own, self._sum
        if divisor != 1:
            self._stream.run(lambda: total.div_(divisor))
        if total is not own:
            self._stream.run(lambda: own.copy_(total))
        return own


class _Sending(NamedTuple):
    work: Work
    bucket: Bucket
    read: Event  # after what reads the bucket


class OrderedSum:
    """Implements `Strategy`. Holds at most one bucket whose sending is not done."""

    passes_through = True

    def __init__(self, transport: Transport, policy: Policy, pool: BufferPool) -> None:
        self._transport = transport
        self._policy = policy
        self._streams = pool.streams
        self._sending: _Sending | None = None
        self._sums: dict[Key, _RunningSum] = {}

    def launch(self, gradient: Gradient) -> None:
        """Put every owner's part there; the bucket is given back when it has been sent."""
        self.finish_sending()
        bucket, own, rank = gradient.bucket, gradient.own, self._transport.rank
        stream = self._streams.reducing
        wire = self._policy.on_the_wire(own.dtype)
        mine = bucket.parts(rank)
        theirs = {dst: bucket.parts(dst) for dst in others(self._transport)}
        works: list[Work] = []

        def send() -> None:
            parts = {dst: [part.to(wire) for part in pieces] for dst, pieces in theirs.items()}
            works.append(self._transport.put(gradient.key, parts))
            torch.cat([part.to(wire) for part in mine], out=own)

        with labelled("send gradient of", gradient.unit.name):
            stream.run(send)
        self._sending = _Sending(_All(works), bucket, stream.record())
        self._sums[gradient.key] = _RunningSum(own, stream)

    def finish_sending(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.work.wait(self._streams.reducing)
            sending.bucket.release(sending.read)

    def advance(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            self._fold(gradient)

    def _fold(self, gradient: Gradient) -> None:
        """Add the parts that have come, as far as no rank before them is missing."""
        done = self._sums[gradient.key].ranks
        for rank in range(len(done), self._transport.world):
            if rank != self._transport.rank and not self._transport.arrived(gradient.key, rank):
                return
            self._add(gradient, rank)

    def _add(self, gradient: Gradient, rank: int) -> None:
        mine = rank == self._transport.rank
        part = gradient.own if mine else self._transport.take(gradient.key, rank, gradient.unit.name)
        self._sums[gradient.key].add(rank, part)

    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        """Nothing has to be started: parts are on their way."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        running = self._sums[gradient.key]
        with labelled("sum of gradient of", gradient.unit.name):
            for rank in sorted(offers):
                if rank not in running.ranks:
                    self._add(gradient, rank)
        given_up = [rank for rank in running.ranks if rank not in offers]
        if given_up:
            fail_given_up(self._transport, given_up[0], gradient.unit)
        del self._sums[gradient.key]
        return self._finish(running)

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        stream = self._streams.reducing
        running = _RunningSum(stream.empty(unit.layout.shard_numel, unit.layout.dtype), stream)
        with labelled("sum of gradient of", unit.name):
            for rank in sorted(offers):
                running.add(rank, self._transport.take(key, rank, unit.name))
        return self._finish(running)

    def _finish(self, running: _RunningSum) -> torch.Tensor:
        total = running.finish(self._transport.world if self._policy.mean else 1)
        self._streams.current().wait(self._streams.reducing.record())
        return total

    def give_up(self, gradient: Gradient) -> None:
        del self._sums[gradient.key]


class _Reducing(NamedTuple):
    """A reduce-scatter that was started."""

    gradient: Gradient
    work: Work
    part: torch.Tensor  # of this rank, when the work is done

    def release(self, read: Event) -> None:
        if not self.gradient.bucket.given_back:
            self.gradient.bucket.release(read)


class BackendSum:
    """Implements `Strategy`.

    Rule 1: a reduction that all ranks have agreed on (`Transport.agreed`) is started by all, in that order, also by a
            rank that has given up the gradient since: the others may not know, and would wait for it.
    Rule 2: at a meeting those that all ranks offer and that were not agreed on before are started, in the order of
            their keys. Where some ranks have nothing, parts travel one by one and are added up in rank order.
    Rule 3: nothing waits for a reduction before the end of the backward, so as many buckets are held as there are
            gradients that some rank does not have yet: up to the whole model's, where one rank is far behind.
    """

    passes_through = False  # the backend takes one piece of memory

    def __init__(self, transport: Transport, policy: Policy, pool: BufferPool) -> None:
        self._transport = transport
        self._policy = policy
        self._streams = pool.streams
        self._ordered = OrderedSum(transport, policy, pool)
        self._waiting: dict[Key, Gradient] = {}  # announced, not started
        self._started: dict[Key, _Reducing] = {}
        self._given_up: set[Key] = set()

    def launch(self, gradient: Gradient) -> None:
        self._waiting[gradient.key] = gradient
        if gradient.key.turn != FLUSHED:  # of those a meeting has just said who has them
            self._transport.ready(gradient.key)

    def advance(self, gradients: Sequence[Gradient]) -> None:
        for key in self._transport.agreed():
            self._start(key)
        for reducing in self._started.values():  # their memory serves the next ones
            if reducing.work.done():
                reducing.release(self._streams.reducing.record())

    def _start(self, key: Key) -> None:
        gradient = self._waiting.pop(key)
        stream = self._streams.reducing
        wire = self._policy.on_the_wire(gradient.own.dtype)
        part = stream.empty(gradient.own.numel(), wire)
        works: list[Work] = []
        with labelled("reduce-scatter of", gradient.unit.name):
            stream.run(lambda: works.append(self._transport.reduce_scatter(part, gradient.bucket.store.to(wire))))
        self._started[key] = _Reducing(gradient, _All(works), part)

    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        self.advance(())
        for key in list(self._waiting):
            if key in self._given_up:
                self._waiting.pop(key).bucket.discard()
        for key in [key for key in self._started if key in self._given_up]:
            self._finish(key)
        self._given_up.clear()
        for key, ranks in offers.items():
            if key in self._waiting and len(ranks) == self._transport.world:
                self._start(key)

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        world = self._transport.world
        if gradient.key in self._waiting and len(offers) == world:
            self._start(gradient.key)
        if gradient.key not in self._started:
            self._waiting.pop(gradient.key)
            self._ordered.launch(gradient)
            return self._ordered.total(gradient, offers)
        if len(offers) < world:
            absent = next(rank for rank in range(world) if rank not in offers)
            fail_given_up(self._transport, absent, gradient.unit)
        part = self._finish(gradient.key)
        stream = self._streams.reducing
        divisor = world if self._policy.mean else 1
        stream.run(lambda: torch.div(part, divisor, out=gradient.own))
        self._streams.current().wait(stream.record())
        return gradient.own

    def _finish(self, key: Key) -> torch.Tensor:
        reducing = self._started.pop(key)
        with labelled("wait for reduce-scatter of", reducing.gradient.unit.name):
            reducing.work.wait(self._streams.reducing)
        reducing.release(self._streams.reducing.record())
        return reducing.part

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        return self._ordered.total_of_others(unit, key, offers)

    def give_up(self, gradient: Gradient) -> None:
        self._given_up.add(gradient.key)

    def finish_sending(self) -> None:
        self._ordered.finish_sending()


class _All:
    """Several works as one. The list may still be filled by what was issued to a stream."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, stream: Stream) -> None:
        for work in self._works:
            work.wait(stream)

    def done(self) -> bool:
        return bool(self._works) and all(work.done() for work in self._works)


def others(transport: Transport) -> list[int]:
    """The other ranks, nearest first, so that not everybody asks rank 0 at once."""
    return [(transport.rank + step) % transport.world for step in range(1, transport.world)]


def fail_given_up(transport: Transport, rank: int, unit: Unit) -> NoReturn:
    transport.fail(
        f"rank {transport.rank}: rank {rank} gave up a backward in which it had already sent its gradient of unit "
        f"{unit.name}, and this rank did not; let all ranks give up a backward, or none"
    )
