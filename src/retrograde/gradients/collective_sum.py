"""Sums by collectives that all ranks come to in one order (transport/order), so that it is known who has a gradient.

A want names what each parameter's gradient is for, so ranks that come to the same one have the same parameters'
gradients for the same uses. What a flush or a step asks for goes by the same calls: a meeting has said what comes, and
a rank that has nothing brings zeros, which change no sum.
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
from retrograde.gradients.strategy import Contributors, RunningSum
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


class CollectiveSum:
    """Implements `Strategy`."""

    passes_through = False  # a collective takes one piece of memory

    def __init__(self, transport: OrderedTransport, policy: Policy, pool: BufferPool) -> None:
        self._transport = transport
        self._policy = policy
        self._streams = pool.streams
        self._started: dict[Key, _Exchange] = {}
        self._sending: deque[_Exchange] = deque()

    def contributors(self, gradient: Gradient) -> Contributors | None:
        return dict.fromkeys(range(self._transport.world), gradient.uses)

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
        self._start(gradient.unit, gradient.key, gradient.uses, sent, gradient.bucket)

    def _start(self, unit: Unit, key: Key, uses: Uses, sent: torch.Tensor, bucket: Bucket | None) -> None:
        want = GradientWant(unit.index, unit.name, _named(uses), key.turn == FLUSHED)
        stream = self._streams.reducing
        with labelled("reduction of", unit.name):
            if self._policy.exact:
                brought = stream.empty(sent.numel(), sent.dtype)
                work = self._transport.exchange(want, sent, brought)
            else:
                brought = stream.empty(unit.layout.shard_numel, sent.dtype)
                work = self._transport.add_up(want, sent, brought)
        reducing = _Exchange(work, bucket, brought)
        self._started[key] = reducing
        self._sending.append(reducing)

    def _finish_first(self) -> None:
        reducing = self._sending.popleft()
        stream = self._streams.reducing
        reducing.work.wait(stream)
        if reducing.bucket is not None:
            reducing.bucket.release(stream.record())
            reducing.bucket = None

    def advance(self, gradients: Sequence[Gradient]) -> None:
        """A call goes on by itself."""

    def finish_sending(self) -> None:
        """On an accelerator the host waits for nothing: the memory is free when the stream has come to it."""
        while self._sending and (not self._streams.on_host or self._sending[0].work.done()):
            self._finish_first()

    # ---- sums
    def begin_sums(self, offers: Mapping[Key, Contributors]) -> None:
        """What a meeting asks for is started one by one, in the order of keys."""

    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        return self._total(gradient.key, gradient.unit, gradient.own)

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        stream = self._streams.reducing
        own = room_for_sum(unit, self._streams)
        wire = self._policy.on_the_wire(self._policy.waiting(unit.layout.dtype))
        nothing = stream.empty(unit.layout.padded_numel, wire)
        stream.run(nothing.zero_)
        self._start(unit, key, (), nothing, None)
        return self._total(key, unit, own)

    def _total(self, key: Key, unit: Unit, own: torch.Tensor) -> torch.Tensor:
        reducing = self._started.pop(key)
        while reducing in self._sending:
            self._finish_first()
        stream = self._streams.reducing
        summed = RunningSum(own, stream)
        with labelled("sum of gradient of", unit.name):
            for rank, part in enumerate(reducing.brought.view(-1, unit.layout.shard_numel).unbind()):
                summed.add(rank, part)
            summed.finish(self._transport.world if self._policy.mean else 1)
        self._streams.current().wait(stream.record())
        return own

    def give_up(self, gradient: Gradient) -> None:
        """All ranks have given it up, or will be told. The call goes on, and its memory is free after it."""
        del self._started[gradient.key]


def _named(uses: Uses) -> bytes:
    """What the order compares: the uses themselves, or of very many a digest."""
    plain = bytes(uses)
    return plain if len(plain) <= MOST_USES else hashlib.blake2b(plain, digest_size=16).digest()
