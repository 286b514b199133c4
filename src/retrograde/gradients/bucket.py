"""A bucket: one unit's unreduced gradient on this rank, each part of it written once by each backward that has one.

The unit is the bucket: its gradient is a flat store in the unit's layout, taken from a pool and used again. A gradient
of `HUGE` bytes or more that is sent at once has no place in the store: it is *passed through*, sent from where autograd
left it. What waits for other backwards is copied, since its owner may change it. What the streams of a device have to
wait for is in [Note: producers] of devices/streams.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from retrograde.devices import Event, Stream
from retrograde.pages import BufferPool, Unit

HUGE = 2**22
Grads = Sequence[torch.Tensor | None]


def huge(grads: Grads) -> dict[int, torch.Tensor]:
    return {i: grad for i, grad in enumerate(grads) if grad is not None and grad.nbytes >= HUGE}


class _Producer(NamedTuple):
    stream: Stream
    event: Event
    slots: frozenset[int]


class Bucket:
    def __init__(self, unit: Unit, pool: BufferPool, passed: Mapping[int, torch.Tensor]) -> None:
        self.unit, self._pool = unit, pool
        self._passed = {index: unit.layout.slots[index].flatten(grad) for index, grad in sorted(passed.items())}
        self.present = [False] * len(unit.leaves)
        self._producers: list[_Producer] = []
        numel = unit.layout.padded_numel - sum(grad.numel() for grad in passed.values())
        self.store, self._free = pool.take(numel, unit.layout.dtype)

    def add(self, grads: Grads) -> None:
        """The gradients of one producer, on its stream."""
        stream = self._pool.streams.current()
        mine = {index: grad for index, grad in enumerate(grads) if grad is not None}
        stream.wait(self._free)
        for other in self._producers:
            if not other.slots.isdisjoint(mine):
                stream.wait(other.event)
        for index, grad in mine.items():
            if index not in self._passed:
                place = self.unit.layout.slots[index].full(self.place(index))
                write = place.add_ if self.present[index] else place.copy_
                stream.run(lambda write=write, grad=grad: write(grad))  # type: ignore[misc]
            self.present[index] = True
        self._producers.append(_Producer(stream, stream.record(), frozenset(mine)))

    def place(self, index: int) -> torch.Tensor:
        slot = self.unit.layout.slots[index]
        start = slot.offset - sum(grad.numel() for other, grad in self._passed.items() if other < index)
        return self.store[start : start + slot.numel]

    def close(self, stream: Stream) -> None:
        """The last producer has come, and `stream` reads from now on. What nobody wrote travels as zeros."""
        for producer in self._producers:
            stream.wait(producer.event)
        at, written = 0, [self.place(i) for i, p in enumerate(self.present) if p and i not in self._passed]
        for place in [*written, self.store[self.store.numel() :]]:
            if at < (start := int(place.storage_offset())):
                stream.run(self.store[at:start].zero_)
            at = start + place.numel()

    def parts(self, rank: int) -> list[torch.Tensor]:
        """What `rank` owns of this gradient, in order, as pieces of memory."""
        span = self.unit.layout.span(rank)
        pieces = [run[max(span.start - at, 0) : max(span.stop - at, 0)] for at, run in self._runs()]
        return [piece for piece in pieces if piece.numel()] or pieces[:1]

    def _runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Memory end to end, as it lies in the unit's layout: the store, and gradients between its parts."""
        at = shift = 0
        for index, grad in self._passed.items():
            slot = self.unit.layout.slots[index]
            yield at, self.store[at - shift : slot.offset - shift]
            yield slot.offset, grad
            at, shift = slot.end, shift + slot.numel
        yield at, self.store[at - shift :]

    def release(self, read: Event) -> None:
        """Give the memory back; `read` comes after everything that reads it."""
        if self._passed:
            for producer in self._producers:
                producer.stream.wait(read)
            self._passed.clear()  # autograd's memory, not the pool's
        self._pool.give(self.store, read)

    def discard(self) -> None:
        """Nobody wants it any more: the last to touch it are its producers."""
        stream = self._pool.streams.reducing
        for producer in self._producers:
            stream.wait(producer.event)
        self.release(stream.record())
