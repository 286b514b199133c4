"""Sums by collectives that all ranks come to in one order (transport/order), so that it is known who has a gradient.

A want names what each parameter's gradient is for, so ranks that come to the same one have the same parameters'
gradients for the same uses. What a flush or a step asks for goes by the same calls: a meeting has said what comes, and
a rank that has nothing brings zeros, which change no sum.

Rule 1: a rank that has strayed from the order puts its parts one by one (`OrderedSum`).
Rule 2: a reduction in which a rank was absent is given over to `OrderedSum`, with the parts that came: they are added
        up in rank order at the next meeting, when the late ones are known. Whoever has the gradient meets for it.
Rule 3: what every rank brought to a call is added up without a meeting. If a rank gives it up, all must; that is said
        at the next meeting.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from retrograde.gradients.bucket import Bucket
from retrograde.gradients.gradient import Gradient
from retrograde.gradients.keys import FLUSHED
from retrograde.gradients.landing import room_for_sum
from retrograde.gradients.strategy import Contributors, OrderedSum, RunningSum
from retrograde.labels import labelled
from retrograde.layout import Policy
from retrograde.pages import BufferPool, Unit
from retrograde.transport import GradientWant, Key, OrderedTransport, Uses, Work

MOST_IN_FLIGHT = 2  # buckets that are being sent; more are not taken from the pool
MOST_USES = 1024  # parameters of a unit whose uses are named one by one


@dataclass(slots=True)
class _Exchange:
    """A call under way: what it reads, until it has read it, and what it brings."""

    work: Work
    bucket: Bucket | None
    brought: torch.Tensor  # every rank's part of this rank's shard, or their sum
    complete: bool | None = None  # did every rank bring a part? None: nobody has looked yet


class CollectiveSum:
    """Implements `Strategy`."""

    passes_through = False  # a collective takes one piece of memory

    def __init__(self, transport: OrderedTransport, policy: Policy, pool: BufferPool, one_by_one: OrderedSum) -> None:
        """`one_by_one`: for what ranks that stray bring, and for what they were absent from."""
        self._transport = transport
        self._one_by_one = one_by_one
        self._policy = policy
        self._streams = pool.streams
        self._started: dict[Key, _Exchange] = {}
        self._sending: deque[_Exchange] = deque()
        self._given_up: dict[Key, _Exchange] = {}

    def contributors(self, gradient: Gradient) -> Contributors | None:
        """All ranks, or it is not known before a meeting."""
        reducing = self._started.get(gradient.key)
        if reducing is None:
            return None
        if not self._is_complete(reducing):
            self._set_apart(gradient, reducing)
            return None
        return dict.fromkeys(range(self._transport.world), gradient.uses)

    def _is_complete(self, reducing: _Exchange) -> bool:
        """On a device nobody looks, since no rank is absent from a call there."""
        if reducing.complete is None:
            self._finish(reducing)
            world = self._transport.world
            reducing.complete = not self._streams.on_host or len(self._transport.present(reducing.brought)) == world
        return reducing.complete

    def _set_apart(self, gradient: Gradient, reducing: _Exchange) -> None:
        """Rule 2."""
        parts = self._transport.present(reducing.brought)
        gradient.own.copy_(parts.pop(self._transport.rank))
        self._transport.keep(gradient.key, parts)
        self._one_by_one.take_over(gradient)
        del self._started[gradient.key]

    # ---- sending
    def launch(self, gradient: Gradient) -> None:
        while len(self._sending) >= MOST_IN_FLIGHT:
            self._finish_first()
        wire = self._policy.on_the_wire(self._policy.waiting(gradient.unit.layout.dtype))
        stream = self._streams.reducing
        sent = gradient.bucket.store
        if sent.dtype != wire:
            sent = stream.empty(sent.numel(), wire)
            stream.run(lambda: sent.copy_(gradient.bucket.store))
        if not self._start(gradient.unit, gradient.key, gradient.uses, sent, gradient.bucket):
            self._one_by_one.launch(gradient)

    def _start(self, unit: Unit, key: Key, uses: Uses, sent: torch.Tensor, bucket: Bucket | None) -> bool:
        """Returns whether it goes by a call."""
        want = GradientWant(key, unit.name, _named(uses), key.turn == FLUSHED)
        stream = self._streams.reducing
        with labelled("reduction of", unit.name):
            if self._policy.exact or self._streams.on_host:  # where it can be seen whose part is missing
                brought = stream.empty(sent.numel(), sent.dtype)
                work = self._transport.exchange(want, sent, brought)
            else:
                brought = stream.empty(unit.shard.numel(), sent.dtype)
                work = self._transport.add_up(want, sent, brought)
        if work is None:
            return False
        reducing = _Exchange(work, bucket, brought)
        self._started[key] = reducing
        self._sending.append(reducing)
        return True

    def _finish_first(self) -> None:
        reducing = self._sending.popleft()
        stream = self._streams.reducing
        reducing.work.wait(stream)
        if reducing.bucket is not None:
            reducing.bucket.release(stream.record())
            reducing.bucket = None

    def _finish(self, reducing: _Exchange) -> None:
        while reducing in self._sending:
            self._finish_first()

    def advance(self, gradients: Sequence[Gradient]) -> None:
        """A call goes on by itself."""

    def finish_sending(self) -> None:
        """On an accelerator the host waits for nothing: the memory is free when the stream has come to it."""
        self._one_by_one.finish_sending()
        while self._sending and (not self._streams.on_host or self._sending[0].work.done()):
            self._finish_first()

    # ---- sums
    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        """What a meeting asks for is started one by one, in the order of keys."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        if gradient.key not in self._started:
            return self._one_by_one.total(gradient, offers)
        return self._total(gradient.key, gradient.unit, gradient.own)

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        if key.turn != FLUSHED:
            return self._one_by_one.total_of_others(unit, key, offers)
        stream = self._streams.reducing
        own = room_for_sum(unit, self._streams)
        wire = self._policy.on_the_wire(self._policy.waiting(unit.layout.dtype))
        nothing = stream.empty(unit.layout.padded_numel, wire)
        stream.run(nothing.zero_)
        self._start(unit, key, (), nothing, None)
        return self._total(key, unit, own)

    def _total(self, key: Key, unit: Unit, own: torch.Tensor) -> torch.Tensor:
        reducing = self._started.pop(key)
        self._finish(reducing)
        stream = self._streams.reducing
        summed = RunningSum(own, stream)
        with labelled("sum of gradient of", unit.name):
            for rank, part in enumerate(_parts(reducing.brought, unit.shard.numel())):
                summed.add(rank, part)
            summed.finish(self._transport.world if self._policy.mean else 1)
        self._streams.current().wait(stream.record())
        return own

    def give_up(self, gradient: Gradient) -> None:
        """The call goes on, and its memory is free after it."""
        if gradient.key in self._started:
            self._given_up[gradient.key] = self._started.pop(gradient.key)
        else:
            self._one_by_one.give_up(gradient)

    def withdrawn(self) -> Sequence[Key]:
        """Rule 3."""
        given_up, self._given_up = self._given_up, {}
        return [key for key, reducing in given_up.items() if self._is_complete(reducing)]


def _parts(brought: torch.Tensor, numel: int) -> Sequence[torch.Tensor]:
    return brought.view(-1, numel).unbind() if numel else [brought]


def _named(uses: Uses) -> bytes:
    """What the order compares: the uses themselves, or of very many a digest."""
    plain = bytes(uses)
    return plain if len(plain) <= MOST_USES else hashlib.blake2b(plain, digest_size=16).digest()
