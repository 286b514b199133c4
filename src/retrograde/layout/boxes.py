"""A flat range of a tensor as a few boxes in the tensor's true shape.

Others who read shards (torch.distributed.checkpoint) know a part of a tensor by its offset and size in each dimension.
A piece of ours is a range of the flattened parameter. Row by row, a range is the rest of a row, whole rows, and the
beginning of a row; where a row has rows itself, its part is cut in the same way.

    shape (4, 5), range 3 to 17        . . . a a     a: offsets (0, 3), sizes (1, 2), start 0
                                       b b b b b     b: offsets (1, 0), sizes (2, 5), start 2
                                       b b b b b     c: offsets (3, 0), sizes (1, 2), start 12
                                       c c . . .

The elements of a box are one slice of the range. Under that condition there are no fewer boxes, and at most
2 * (dimensions - 1) + 1.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from retrograde.layout.flat import Slot


class Box(NamedTuple):
    """A part of a tensor that is a slice in each dimension, and one slice of a flat range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # the position of its first element in the range
    numel: int


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut a range of a tensor that lies row by row into boxes, in order, each element once.

    An empty range has no boxes, wherever it is: the piece of a rank that has nothing of a parameter is such a range.
    """
    if start == stop:
        return []
    if not 0 <= start < stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are not a range of a tensor of shape {tuple(shape)}")
    found = []
    at = start
    while at < stop:
        box = _largest_box(tuple(shape), at, stop, at - start)
        found.append(box)
        at += box.numel
    return found


def _largest_box(shape: tuple[int, ...], first: int, stop: int, start: int) -> Box:
    """The largest box that begins with element `first` and ends at `stop` or before."""
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements in a row of each dimension
    offsets = tuple(first // row % size for row, size in zip(rows, shape, strict=True))
    for dim, row in enumerate(rows):
        begins_a_row = first % row == 0
        if begins_a_row and stop - first >= row:
            count = min((stop - first) // row, shape[dim] - offsets[dim])
            sizes = (*(1 for _ in shape[:dim]), count, *shape[dim + 1 :])
            return Box(offsets, sizes, start, count * row)
    return Box((), (), start, 1)  # of a tensor without dimensions: every other has rows of one element


def slot_boxes(slot: Slot, start: int, stop: int) -> list[Box]:
    """A range of a parameter's elements in memory order, as boxes whose dimensions are the parameter's own."""
    order = slot.outermost_first
    found = boxes(_permuted(slot.shape, order), start, stop)
    return [box._replace(offsets=_unpermuted(box.offsets, order), sizes=_unpermuted(box.sizes, order)) for box in found]


def view_box(slot: Slot, box: Box, piece: torch.Tensor) -> torch.Tensor:
    """A box's elements in its true shape, as a view of `piece`: the 1-D tensor of the range it was computed for."""
    order = slot.outermost_first
    elements = piece[box.start : box.start + box.numel]
    return elements.view(_permuted(box.sizes, order)).permute(_inverse(order))


def _permuted(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes[dim] for dim in order)


def _unpermuted(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return _permuted(sizes, _inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])
