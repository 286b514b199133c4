"""Where a unit's parameters lie in its flat buffer, and which part of each is on which rank.

A unit's flat buffer is its parameters end to end, padded to a multiple of the world size and cut into
equal shards. A parameter's *piece* on a rank is the overlap of the parameter with that rank's shard; it
may be empty, and it may be the whole parameter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of a unit: its full name, true shape and place in the flat buffer."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]
    dtype: torch.dtype
    world: int

    @staticmethod
    def of(named_shapes: list[tuple[str, torch.Size]], dtype: torch.dtype, world: int) -> "Layout":
        slots, offset = [], 0
        for name, shape in named_shapes:
            slots.append(Slot(name, shape, offset))
            offset = slots[-1].end
        return Layout(tuple(slots), dtype, world)

    @cached_property
    def numel(self) -> int:
        return self.slots[-1].end if self.slots else 0

    @cached_property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world)

    @cached_property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    @cached_property
    def offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    @property
    def page_bytes(self) -> int:
        return self.padded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    def span(self, rank: int) -> slice:
        """The part of the flat buffer that `rank` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, slot: Slot, rank: int) -> slice:
        """The part of `rank`'s shard that belongs to `slot`, in shard coordinates (empty: 0:0)."""
        start = rank * self.shard_numel
        low = max(slot.offset, start) - start
        high = min(slot.end, start + self.shard_numel) - start
        return slice(low, high) if high > low else slice(0, 0)

    def within(self, slot: Slot, rank: int) -> slice:
        """The same piece in coordinates of the flattened parameter."""
        piece = self.piece(slot, rank)
        if piece.start == piece.stop:
            return slice(0, 0)
        shift = rank * self.shard_numel - slot.offset
        return slice(piece.start + shift, piece.stop + shift)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Full-shaped views of the parameters inside a flat buffer."""
        for slot in self.slots:
            yield flat[slot.offset : slot.end].view(slot.shape)
