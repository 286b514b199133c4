"""A bucket: one unit's unreduced gradient on this rank, each part of it written once by each backward that has one.

The unit is the bucket: its gradient is a flat store in the unit's layout, taken from a pool and used again. A
parameter's gradient of `LARGE` bytes or more has no place in the store: it is *kept* where autograd left it, and sent
from there; other backwards add to it. But if somebody else has its memory, it is copied: he may change it before it
has been read, or see it change.

What the streams of a device have to wait for is in [Note: producers] of devices/streams.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from retrograde.devices import Event, Stream
from retrograde.labels import labelled
from retrograde.layout import Layout
from retrograde.pages import BufferPool
from retrograde.torch_internals import lone_gradients

LARGE = 2**16
Grads = Sequence[torch.Tensor | None]
Arrived = tuple[torch.Tensor | None, ...]  # the very tuple with which autograd called a node's backward
Lone = Sequence[int]  # the places of gradients whose memory nobody else has


def lone(grads: Arrived) -> Lone:
    """The places of gradients that may be kept where they are:
    they have at least `LARGE` bytes, and nobody else refers to their memory."""
    return lone_gradients(grads, LARGE)


def keepable(grads: Grads, lone: Lone, layout: Layout, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """By slot, those of the `lone` gradients that can stay where they are:
    they have the bucket's dtype, and lie as the slot does."""
    found = {}
    for index in lone:
        grad = grads[index]
        if grad is not None and grad.dtype == dtype and layout.slots[index].lies_like(grad):
            found[index] = grad
    return found


class _Producer(NamedTuple):
    stream: Stream
    event: Event
    slots: frozenset[int]


class Bucket:
    """The gradients of one unit in one flat piece of memory, in the layout of its page."""

    def __init__(
        self, name: str, layout: Layout, dtype: torch.dtype, pool: BufferPool, kept: Mapping[int, torch.Tensor]
    ) -> None:
        """`name`: the unit's. `dtype`: that of the bucket, in which gradients are added up. `kept`: gradients that stay
        where they are, by slot; whoever adds to such a slot first must bring that gradient."""
        self.dtype = dtype
        self.present = [False] * len(layout.slots)
        self._name = name
        self._layout = layout
        self._pool = pool
        self._kept = {index: layout.slots[index].flatten(grad) for index, grad in sorted(kept.items())}
        self._to_come = set(kept)  # the slots of kept gradients that nobody has brought yet
        self._producers: list[_Producer] = []
        numel = layout.padded_numel - sum(grad.numel() for grad in kept.values())
        loan = pool.take(numel, dtype)
        self._free = loan.free
        self._store: torch.Tensor | None = loan.data

    @property
    def store(self) -> torch.Tensor:
        assert self._store is not None, f"the bucket of unit {self._name} was given back"
        return self._store

    def add(self, grads: Grads, divisor: float = 1) -> None:
        """Add the gradients of one producer, each divided by `divisor`, on the current stream."""
        stream = self._pool.streams.current()
        mine = {index: grad for index, grad in enumerate(grads) if grad is not None}
        stream.wait(self._free)
        for other in self._producers:
            if not other.slots.isdisjoint(mine):
                stream.wait(other.event)
        with labelled("copy into bucket of", self._name):
            for index, grad in mine.items():
                self._write(index, grad, divisor, stream)
                self.present[index] = True
        self._producers.append(_Producer(stream, stream.record(), frozenset(mine)))

    def _write(self, index: int, grad: torch.Tensor, divisor: float, stream: Stream) -> None:
        place = self._layout.slots[index].full(self.place(index))
        if self.present[index]:
            stream.run(lambda: place.add_(grad if divisor == 1 else grad / divisor))
            return
        if index in self._to_come:
            self._to_come.remove(index)  # it is in its place
        else:
            stream.run(lambda: place.copy_(grad))
        if divisor != 1:
            stream.run(lambda: place.div_(divisor))

    def place(self, index: int) -> torch.Tensor:
        if index in self._kept:
            return self._kept[index]
        slot = self._layout.slots[index]
        start = slot.offset - sum(grad.numel() for other, grad in self._kept.items() if other < index)
        return self.store[start : start + slot.numel]

    def written(self, index: int) -> torch.Tensor | None:
        """What has been added up for one parameter, in its place, if anybody has brought something."""
        return self.place(index) if self.present[index] else None

    def forget(self, index: int) -> None:
        """Forget what has been added up for one parameter."""
        self.present[index] = False

    @property
    def empty(self) -> bool:
        return not any(self.present)

    def close(self, stream: Stream) -> None:
        """Let `stream` read the bucket from now on, since the last producer has come.
        What nobody wrote is set to zero."""
        for producer in self._producers:
            stream.wait(producer.event)
        for index, grad in self._kept.items():
            if not self.present[index]:
                stream.run(grad.zero_)
        written = [
            self.place(index) for index, present in enumerate(self.present) if present and index not in self._kept
        ]
        at = 0
        for place in [*written, self.store[self.store.numel() :]]:
            start = int(place.storage_offset())
            if at < start:
                stream.run(self.store[at:start].zero_)
            at = start + place.numel()

    def parts(self, rank: int) -> list[torch.Tensor]:
        """The part of this gradient that belongs to shard `rank`, in order, as pieces of memory."""
        span = self._layout.span(rank)
        pieces = [run[max(span.start - at, 0) : max(span.stop - at, 0)] for at, run in self._runs()]
        return [piece for piece in pieces if piece.numel()] or pieces[:1]

    def _runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The pieces of memory that make up the unit's layout, in order, each with its offset there: parts of the
        store, and kept gradients between them."""
        at = 0
        shift = 0
        for index, grad in self._kept.items():
            slot = self._layout.slots[index]
            yield at, self.store[at - shift : slot.offset - shift]
            yield slot.offset, grad
            at = slot.end
            shift += slot.numel
        yield at, self.store[at - shift :]

    def release(self, read: Event) -> None:
        """Give the memory back; `read` comes after everything that reads it."""
        if self._kept:
            for producer in self._producers:
                producer.stream.wait(read)
            self._kept.clear()  # autograd's memory, not the pool's
        self._pool.give(self.store, read)
        self._store = None

    @property
    def given_back(self) -> bool:
        return self._store is None

    def discard(self) -> None:
        """Give the memory back without sending it, once its producers have written."""
        stream = self._pool.streams.reducing
        for producer in self._producers:
            stream.wait(producer.event)
        self.release(stream.record())
