"""Where a unit's parameters lie in its flat buffer, and which part of each is on which rank.

A unit's flat buffer is its parameters one after the other, padded to a multiple of the world size and cut into
equal shards. Each begins where torch's own allocator might have put it: some kernels (products with a vector) add up
in another order elsewhere. A parameter's *piece* on a rank is the overlap of the parameter with that rank's shard; it
may be empty, and it may be the whole parameter.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Slot(NamedTuple):
    """One parameter of a unit: its full name, true shape and place in the flat buffer."""

    name: str
    shape: torch.Size
    offset: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.offset


class Layout:
    """A unit's parameters one after the other, for a number of ranks."""

    def __init__(self, named_shapes: Sequence[tuple[str, torch.Size]], dtype: torch.dtype, world: int) -> None:
        step = 64 // dtype.itemsize  # bytes, as torch's allocator
        ends = list(itertools.accumulate((-(-shape.numel() // step) * step for _, shape in named_shapes), initial=0))
        self.slots = tuple(Slot(n, s, at, at + s.numel()) for (n, s), at in zip(named_shapes, ends, strict=False))
        self.world = world
        self.offsets, self.dtype, self.shard_numel = ends[:-1], dtype, -(-ends[-1] // world)
        self.numel, self.padded_numel = sum(slot.numel for slot in self.slots), self.shard_numel * world
        self.shard_bytes, self.page_bytes = self.shard_numel * dtype.itemsize, self.padded_numel * dtype.itemsize

    def span(self, rank: int) -> slice:
        """The part of the flat buffer that `rank` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, slot: Slot, rank: int) -> slice:
        """The part of `rank`'s shard that belongs to `slot`, in shard coordinates; it may be empty."""
        low, high = (at - rank * self.shard_numel for at in (slot.offset, slot.end))
        return slice(min(max(low, 0), self.shard_numel), min(max(high, 0), self.shard_numel))

    def within(self, slot: Slot, rank: int) -> slice:
        """The same piece in coordinates of the flattened parameter."""
        piece = self.piece(slot, rank)
        shift = rank * self.shard_numel - slot.offset
        return slice(piece.start + shift, piece.stop + shift)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Full-shaped views of the parameters inside a flat buffer."""
        return (flat[slot.offset : slot.end].view(slot.shape) for slot in self.slots)
