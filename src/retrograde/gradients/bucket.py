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
Arrived = tuple[torch.Tensor | None, ...]  # with which a backward was called: that tuple itself
Lone = Sequence[int]  # the places of gradients whose memory nobody else has


def lone(grads: Arrived) -> Lone:
    """Those that are large enough to be kept, and may be, as far as others have nothing to do with their memory."""
    return lone_gradients(grads, LARGE)


def keepable(grads: Grads, lone: Lone, layout: Layout, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Those that may stay where they are."""
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
        """`name`: the unit's. `dtype`: in which gradients lie, and are added up, in it. `kept`: gradients that stay
        where they are, by slot; the first to add to their slots bring them."""
        self.dtype = dtype
        self.present = [False] * len(layout.slots)
        self._name = name
        self._layout = layout
        self._pool = pool
        self._kept = {index: layout.slots[index].flatten(grad) for index, grad in sorted(kept.items())}
        self._to_come = set(kept)  # of those, what nobody has brought yet
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
        """The gradients of one producer, on its stream, each divided by `divisor`."""
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
        """What was brought for one parameter counts no more."""
        self.present[index] = False

    @property
    def empty(self) -> bool:
        return not any(self.present)

    def close(self, stream: Stream) -> None:
        """The last producer has come, and `stream` reads from now on. What nobody wrote travels as zeros."""
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
        """What `rank` owns of this gradient, in order, as pieces of memory."""
        span = self._layout.span(rank)
        pieces = [run[max(span.start - at, 0) : max(span.stop - at, 0)] for at, run in self._runs()]
        return [piece for piece in pieces if piece.numel()] or pieces[:1]

    def _runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Memory end to end, as it lies in the unit's layout: the store, and gradients between its parts."""
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
        """Nobody wants it any more: the last to touch it are its producers."""
        stream = self._pool.streams.reducing
        for producer in self._producers:
            stream.wait(producer.event)
        self.release(stream.record())
