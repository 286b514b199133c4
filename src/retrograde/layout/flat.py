"""Where a unit's parameters lie in its flat buffer, and which part of each is on which rank.

A unit's flat buffer is its parameters one after the other, padded to a multiple of the number of shards and cut
into equal ones. Each begins where torch's own allocator might have put it: some kernels (products with a vector) add up
in another order elsewhere. A parameter's *piece* on a rank is the overlap of the parameter with that rank's shard; it
may be empty, and it may be the whole parameter.
"""

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

Strides = tuple[int, ...]

ALIGNMENT = 64  # bytes, as torch's allocator


class Slot(NamedTuple):
    """One parameter of a unit: its full name, true shape and place in the flat buffer.

    In the flat buffer its elements are in the order in which they lie in the parameter's own memory. That is row by row
    unless `strides` says otherwise (channels_last, transposed matrices): torch chooses kernels by strides.
    """

    name: str
    shape: torch.Size
    offset: int
    end: int
    strides: Strides | None = None

    @property
    def numel(self) -> int:
        return self.end - self.offset

    @property
    def outermost_first(self) -> tuple[int, ...]:
        """The dimensions in the order in which they lie in memory."""
        dims = tuple(range(len(self.shape)))
        if self.strides is None:
            return dims
        strides = self.strides
        return tuple(sorted(dims, key=lambda dim: strides[dim], reverse=True))

    def full(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter, in its true shape, as a view of its elements in memory order."""
        if self.strides is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.strides, int(flat.storage_offset()))

    def flatten(self, full: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor in the parameter's shape, in memory order. A view where that is possible."""
        if self.strides is None:
            return full.reshape(-1)
        return full.reshape(self.shape).permute(self.outermost_first).reshape(-1)


def strides_of(param: torch.Tensor) -> Strides | None:
    """The strides to keep: None for a tensor that lies row by row, or has gaps or overlaps in its memory."""
    strides = tuple(param.stride())
    if strides == row_by_row(param.shape) or not is_dense(param.shape, strides):
        return None
    return strides


def row_by_row(shape: Sequence[int]) -> Strides:
    """The strides of a tensor that torch has just made."""
    return tuple(torch.empty(shape, device="meta").stride())


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each element has its own place in memory, and there is no place between them.

    A dimension of size 0 counts as one of size 1, as it does when torch computes strides.
    """
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


class Layout:
    """A unit's parameters one after the other, for a number of ranks that hold them together (grid.py)."""

    def __init__(
        self,
        named_shapes: Sequence[tuple[str, torch.Size]],
        dtype: torch.dtype,
        world: int,
        strides: Sequence[Strides | None] = (),
    ) -> None:
        """`strides`: those of each parameter, or None; all lie row by row if it is empty."""
        kept = strides or [None] * len(named_shapes)
        step = ALIGNMENT // dtype.itemsize
        sizes = (-(-shape.numel() // step) * step for _, shape in named_shapes)
        *starts, end = itertools.accumulate(sizes, initial=0)
        self.slots = tuple(
            Slot(name, shape, start, start + shape.numel(), memory)
            for (name, shape), start, memory in zip(named_shapes, starts, kept, strict=True)
        )
        self.world = world
        self.dtype = dtype
        self.offsets = starts
        self.numel = sum(slot.numel for slot in self.slots)  # of the parameters, without what lies between them
        self.shard_numel = -(-end // world)
        self.padded_numel = self.shard_numel * world
        self.shard_bytes = self.shard_numel * dtype.itemsize
        self.page_bytes = self.padded_numel * dtype.itemsize
        self.cuts = tuple(map(self._cut, self.slots))  # parameters with equal ones have the same elements on each rank

    def slots_named(self, names: Collection[str]) -> set[int]:
        return {index for index, slot in enumerate(self.slots) if slot.name in names}

    def _cut(self, slot: Slot) -> tuple[object, ...]:
        """How a parameter is cut: the first rank that has some of it, where each next one begins, and in which order
        its elements lie."""
        first = slot.offset // self.shard_numel if self.shard_numel else 0
        begins = range((first + 1) * self.shard_numel - slot.offset, slot.numel, max(self.shard_numel, 1))
        return (first if slot.numel else 0, slot.numel, slot.strides, *begins)

    def span(self, rank: int) -> slice:
        """The part of the flat buffer that `rank` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, slot: Slot, rank: int) -> slice:
        """The part of `rank`'s shard that belongs to `slot`, in shard coordinates; it may be empty."""
        low, high = (at - rank * self.shard_numel for at in (slot.offset, slot.end))
        return slice(min(max(low, 0), self.shard_numel), min(max(high, 0), self.shard_numel))

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a layout lives as long as its unit
    def runs(self, rank: int) -> list[int]:
        """`rank`'s shard end to end: the sizes of a gap, a piece, a gap, ..., a piece, and the gap at the end."""
        sizes = []
        at = 0
        for slot in self.slots:
            piece = self.piece(slot, rank)
            sizes += [max(piece.start - at, 0), piece.stop - piece.start]
            at = max(at, piece.stop)
        return [*sizes, self.shard_numel - at]

    def within(self, slot: Slot, rank: int) -> slice:
        """The same piece in coordinates of the flattened parameter."""
        piece = self.piece(slot, rank)
        shift = rank * self.shard_numel - slot.offset
        return slice(piece.start + shift, piece.stop + shift)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Full-shaped views of the parameters inside a flat buffer."""
        return (slot.full(flat[slot.offset : slot.end]) for slot in self.slots)
