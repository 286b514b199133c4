"""Where a unit's parameters lie in its flat buffer, and which part of each is on which rank.

A unit's flat buffer is its parameters one after the other, padded to a multiple of the number of shards and cut
into equal ones. Each begins where torch's own allocator might have put it: some kernels (products with a vector) add up
in another order elsewhere. A parameter's *piece* on a rank is the overlap of the parameter with that rank's shard; it
may be empty, and it may be the whole parameter.

Where parameters are to be whole, each lies in the shard of one rank (owners.py), and shards are as long as what they
have: a flat buffer of those has no padding but for that of each parameter. All shards of it are as long as the longest
where collectives need them to be (`even`).

    cut      [ p p p p p q | q q r r r r ]         whole    [ p p p p p | q q q r r r r ]
               shard 0       shard 1                          shard 0     shard 1
"""

import bisect
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

    def lies_like(self, full: torch.Tensor) -> bool:
        """Does a tensor in the parameter's shape lie in memory as the parameter does, so that `flatten` is a view?"""
        if self.strides is None:
            return full.is_contiguous()
        return tuple(full.stride()) == self.strides

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
        shard_of: Sequence[int] | None = None,
        even: bool = False,
    ) -> None:
        """`strides`: those of each parameter, or None; all lie row by row if it is empty. `shard_of`: the shard that
        has all of each parameter, in ascending order; None if they are cut."""
        kept = strides or [None] * len(named_shapes)
        step = ALIGNMENT // dtype.itemsize
        lengths = [-(-shape.numel() // step) * step for _, shape in named_shapes]
        placed = _cut_up(lengths, world) if shard_of is None else _whole(lengths, shard_of, world, step, even)
        self.slots = tuple(
            Slot(name, shape, start, start + shape.numel(), memory)
            for (name, shape), start, memory in zip(named_shapes, placed.starts, kept, strict=True)
        )
        self.world = world
        self.dtype = dtype
        self.offsets = placed.starts
        self.numel = sum(slot.numel for slot in self.slots)  # of the parameters, without what lies between them
        self.shard_of = None if shard_of is None else tuple(shard_of)
        self.shard_sizes = placed.sizes
        self.shard_numel = max(placed.sizes)  # of the longest
        *self._begins, self.padded_numel = itertools.accumulate(placed.sizes, initial=0)
        self.shard_bytes = self.shard_numel * dtype.itemsize
        self.page_bytes = self.padded_numel * dtype.itemsize
        self.cuts = tuple(map(self._cut, self.slots))  # parameters with equal ones have the same elements on each rank

    def slots_named(self, names: Collection[str]) -> set[int]:
        return {index for index, slot in enumerate(self.slots) if slot.name in names}

    def _cut(self, slot: Slot) -> tuple[object, ...]:
        """How a parameter is cut: the first rank that has some of it, where each next one begins, and in which order
        its elements lie."""
        if not slot.numel:
            return (0, 0, slot.strides)
        first = bisect.bisect_right(self._begins, slot.offset) - 1
        end = bisect.bisect_left(self._begins, slot.end)
        begins = [begin - slot.offset for begin in self._begins[first + 1 : end]]
        return (first, slot.numel, slot.strides, *begins)

    def shard_with(self, place: int) -> int | None:
        """The shard that has all of a parameter, where that is so for every parameter of the unit."""
        if self.world == 1:
            return 0
        return None if self.shard_of is None else self.shard_of[place]

    def span(self, rank: int) -> slice:
        """The part of the flat buffer that `rank` owns."""
        return slice(self._begins[rank], self._begins[rank] + self.shard_sizes[rank])

    def bytes_of(self, rank: int) -> int:
        """How many bytes `rank`'s shard has in the page."""
        return self.shard_sizes[rank] * self.dtype.itemsize

    def piece(self, slot: Slot, rank: int) -> slice:
        """The part of `rank`'s shard that belongs to `slot`, in shard coordinates; it may be empty."""
        size, begin = self.shard_sizes[rank], self._begins[rank]
        low, high = slot.offset - begin, slot.end - begin
        return slice(min(max(low, 0), size), min(max(high, 0), size))

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a layout lives as long as its unit
    def runs(self, rank: int) -> list[int]:
        """`rank`'s shard end to end: the sizes of a gap, a piece, a gap, ..., a piece, and the gap at the end."""
        sizes = []
        at = 0
        for slot in self.slots:
            piece = self.piece(slot, rank)
            sizes += [max(piece.start - at, 0), piece.stop - piece.start]
            at = max(at, piece.stop)
        return [*sizes, self.shard_sizes[rank] - at]

    def within(self, slot: Slot, rank: int) -> slice:
        """The part of `slot` that lies in `rank`'s shard, in coordinates of the flattened parameter;
        it may be empty."""
        piece = self.piece(slot, rank)
        shift = self._begins[rank] - slot.offset
        return slice(piece.start + shift, piece.stop + shift)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Full-shaped views of the parameters inside a flat buffer."""
        return (slot.full(flat[slot.offset : slot.end]) for slot in self.slots)


class _Placed(NamedTuple):
    """Where each parameter begins in the flat buffer, and how long each shard is."""

    starts: list[int]
    sizes: tuple[int, ...]


def _cut_up(lengths: Sequence[int], world: int) -> _Placed:
    """Place parameters end to end, in equal shards."""
    *starts, end = itertools.accumulate(lengths, initial=0)
    return _Placed(starts, (-(-end // world),) * world)


def _whole(lengths: Sequence[int], shard_of: Sequence[int], world: int, least: int, even: bool) -> _Placed:
    """Place parameters end to end, each within its shard. No shard is empty:
    to have nothing is not a case of its own elsewhere."""
    sizes = [0] * world
    for length, shard in zip(lengths, shard_of, strict=True):
        sizes[shard] += length
    sizes = [max(size, least) for size in sizes]
    if even:
        sizes = [max(sizes)] * world
    at = list(itertools.accumulate(sizes, initial=0))
    starts = []
    for length, shard in zip(lengths, shard_of, strict=True):
        starts.append(at[shard])
        at[shard] += length
    return _Placed(starts, tuple(sizes))
