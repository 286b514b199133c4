"""Flat ranges as boxes: each element once, in order, in true shapes, and never more boxes than needed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from retrograde.layout import Box, Layout, Slot, slot_boxes, strides_of, view_box
from retrograde.layout.boxes import boxes

SMALL = [shape for dims in range(5) for shape in itertools.product((0, 1, 2, 3), repeat=dims)]


def _ranges(numel: int) -> list[tuple[int, int]]:
    return [(start, stop) for start in range(numel + 1) for stop in range(start, numel + 1)]


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box, as slices of the whole tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _check_range(shape: Sequence[int], start: int, stop: int) -> None:
    """The boxes, one after the other, hold exactly the numbers of the range."""
    numbered = torch.arange(math.prod(shape)).view(tuple(shape))
    found = boxes(shape, start, stop)
    parts = [_part(numbered, box).reshape(-1) for box in found]
    assert [number for part in parts for number in part.tolist()] == list(range(start, stop)), (shape, start, stop)
    assert [box.numel for box in found] == [part.numel() for part in parts]
    assert [box.start for box in found] == [int(part[0]) - start for part in parts]


def _slot(tensor: torch.Tensor) -> Slot:
    return Slot("weight", tensor.shape, 0, tensor.numel(), strides_of(tensor))


@pytest.mark.parametrize("dims", range(5))
def test_every_range_of_small_shapes(dims: int) -> None:
    for shape in SMALL:
        if len(shape) == dims and math.prod(shape) <= 24:
            for start, stop in _ranges(math.prod(shape)):
                _check_range(shape, start, stop)


def test_random_ranges_of_random_shapes() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = [draw.choice((1, 1, 2, 3, 5, 8)) for _ in range(draw.randrange(7))]
        ends = [draw.randint(0, math.prod(shape)) for _ in range(2)]
        _check_range(shape, min(ends), max(ends))


def test_the_drawing() -> None:
    assert boxes((4, 5), 3, 17) == [
        Box((0, 3), (1, 2), 0, 2),
        Box((1, 0), (2, 5), 2, 10),
        Box((3, 0), (1, 2), 12, 2),
    ]


def test_whole_tensors_are_one_box() -> None:
    for shape in SMALL:
        numel = math.prod(shape)
        whole = [Box((0,) * len(shape), shape, 0, numel)]
        assert boxes(shape, 0, numel) == (whole if numel else []), shape


def test_an_empty_range_may_be_anywhere() -> None:
    """The empty piece of a rank lies before or after the parameter (`Layout.within`)."""
    for at in (-3, 0, 6, 99):
        assert boxes((2, 3), at, at) == []
    assert boxes((0, 3), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), ((-1, 2), (0, 7), (4, 3), (6, 8)))
def test_what_is_no_range_raises(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"{start} to {stop} .* \(2, 3\)"):
        boxes((2, 3), start, stop)


# ---- no more boxes than needed
def _all_boxes(shape: Sequence[int]) -> set[tuple[int, int]]:
    """The first element and the end of every box whose elements are one range: all boxes there are, looked at."""
    numbered = torch.arange(math.prod(shape)).view(tuple(shape))
    slices = [[slice(low, high) for low in range(size) for high in range(low + 1, size + 1)] for size in shape]
    parts = [numbered[chosen].reshape(-1) for chosen in itertools.product(*slices)]
    ends = ((int(part[0]), int(part[-1]) + 1, part.numel()) for part in parts)
    return {(first, end) for first, end, numel in ends if end - first == numel}


def _fewest(possible: set[tuple[int, int]], start: int, stop: int) -> int:
    fewest = {start: 0}
    for end in range(start + 1, stop + 1):
        fewest[end] = 1 + min(fewest[first] for first in range(start, end) if (first, end) in possible)
    return fewest[stop]


@pytest.mark.parametrize("shape", ((), (4,), (3, 4), (1, 4), (4, 1), (2, 3, 3), (3, 1, 3), (2, 1, 3, 2), (2, 2, 2, 2)))
def test_there_are_never_fewer_boxes(shape: tuple[int, ...]) -> None:
    possible = _all_boxes(shape)
    for start, stop in _ranges(math.prod(shape)):
        assert len(boxes(shape, start, stop)) == _fewest(possible, start, stop), (start, stop)


@pytest.mark.parametrize("dims", range(1, 5))
def test_the_most_boxes_there_can_be(dims: int) -> None:
    shape = (3,) * dims
    counts = [len(boxes(shape, start, stop)) for start, stop in _ranges(math.prod(shape))]
    assert max(counts) == 2 * (dims - 1) + 1


# ---- parameters that do not lie row by row
def _tensors() -> list[torch.Tensor]:
    """Small tensors in all orders of memory, numbered as they lie there."""
    found = []
    for shape in ((), (5,), (2, 3), (3, 1), (0, 2), (2, 3, 2), (1, 3, 2), (2, 2, 3, 1), (2, 3, 1, 2)):
        numbered = torch.arange(math.prod(shape)).view(shape)
        found += [numbered.permute(order) for order in itertools.permutations(range(len(shape)))]
    return found


def test_boxes_of_parameters_in_any_order_of_memory() -> None:
    for tensor in _tensors():
        slot = _slot(tensor)
        memory = slot.flatten(tensor)
        for start, stop in _ranges(tensor.numel()):
            found = slot_boxes(slot, start, stop)
            piece = memory[start:stop].clone()
            views = [view_box(slot, box, piece) for box in found]
            assert all(torch.equal(view, _part(tensor, box)) for view, box in zip(views, found, strict=True))
            assert sum(box.numel for box in found) == stop - start
            assert [box.start for box in found] == list(itertools.accumulate((b.numel for b in found), initial=0))[:-1]


def test_channels_last_is_cut_as_it_lies() -> None:
    """Two pixels of one image are one box; row by row each channel would need its own."""
    tensor = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert slot_boxes(_slot(tensor), 3, 9) == [Box((0, 0, 0, 1), (1, 3, 1, 2), 0, 6)]


def test_what_is_written_to_a_view_is_in_the_piece() -> None:
    for tensor in _tensors():
        slot = _slot(tensor)
        piece = torch.full((tensor.numel(),), -1)
        for box in slot_boxes(slot, 0, tensor.numel()):
            view_box(slot, box, piece).copy_(_part(tensor, box))
        assert torch.equal(slot.full(piece), tensor)


@pytest.mark.parametrize("world", (1, 2, 3, 5))
def test_the_pieces_of_all_ranks_make_every_parameter(world: int) -> None:
    tensors = [tensor.float() for tensor in _tensors()]
    named = [(f"p{index}", tensor.shape) for index, tensor in enumerate(tensors)]
    layout = Layout(named, torch.float32, world, [strides_of(tensor) for tensor in tensors])
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        rebuilt = torch.full(tensor.shape, -1.0)
        for rank in range(world):
            within = layout.within(slot, rank)
            piece = slot.flatten(tensor)[max(within.start, 0) : max(within.stop, 0)]
            for box in slot_boxes(slot, within.start, within.stop):
                _part(rebuilt, box).copy_(view_box(slot, box, piece))
        assert torch.equal(rebuilt, tensor), slot
