"""Where parameters lie: pieces tile every parameter, whatever its shape and however many ranks share it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from retrograde.layout import Layout, is_dense, row_by_row, strides_of

SHAPES = {
    "plain": [(4, 3), (5,), (2, 2, 2)],
    "zero-size first": [(0, 3), (4,), (2, 0), (3,)],
    "0-dim": [(), (7,), ()],
    "tiny": [(1,)],
    "nothing": [(0,), (3, 0)],
    "large first": [(31, 17), (1,), (), (0,), (2,)],
}
WORLDS = range(1, 9)


def _layout(name: str, world: int, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout([(f"p{i}", torch.Size(shape)) for i, shape in enumerate(SHAPES[name])], dtype, world)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("world", WORLDS)
def test_pieces_tile_every_parameter(name: str, world: int) -> None:
    layout = _layout(name, world)
    for slot in layout.slots:
        parts = [layout.within(slot, rank) for rank in range(world)]
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(slot.numel))
        for rank, part in enumerate(parts):
            piece = layout.piece(slot, rank)
            assert piece.stop - piece.start == part.stop - part.start
            assert 0 <= piece.start <= piece.stop <= layout.shard_numel


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("world", WORLDS)
def test_shards_tile_the_page(name: str, world: int) -> None:
    layout = _layout(name, world)
    assert layout.numel == sum(math.prod(shape) for shape in SHAPES[name])
    assert layout.padded_numel == layout.shard_numel * world
    rooms = sum(-(-math.prod(shape) // 16) * 16 for shape in SHAPES[name])
    assert 0 <= layout.padded_numel - rooms < world
    spans = [layout.span(rank) for rank in range(world)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(layout.padded_numel))
    covered = []
    for rank in range(world):
        pieces = [layout.piece(slot, rank) for slot in layout.slots]
        covered += [rank * layout.shard_numel + i for piece in pieces for i in range(piece.start, piece.stop)]
    assert covered == [i for slot in layout.slots for i in range(slot.offset, slot.end)]
    assert len(set(covered)) == layout.numel, "pieces overlap"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64, torch.complex128))
@pytest.mark.parametrize("name", SHAPES)
def test_parameters_begin_where_torch_might_have_put_them(name: str, dtype: torch.dtype) -> None:
    layout = _layout(name, 3, dtype)
    page = torch.empty(layout.padded_numel, dtype=dtype)
    assert all(view.data_ptr() % 64 == 0 for view in layout.views(page))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("world", WORLDS)
def test_scatter_and_view_are_inverse(name: str, world: int) -> None:
    """Pieces of known values, put where the layout says and viewed as a page, are the values."""
    layout = _layout(name, world)
    values = [torch.arange(slot.numel).float().add(100 * i).view(slot.shape) for i, slot in enumerate(layout.slots)]
    page = torch.full((layout.padded_numel,), -1.0)
    for rank in range(world):
        shard = page[layout.span(rank)]
        for slot, value in zip(layout.slots, values, strict=True):
            shard[layout.piece(slot, rank)] = value.reshape(-1)[layout.within(slot, rank)]
    views = list(layout.views(page))
    assert all(torch.equal(view, value) for view, value in zip(views, values, strict=True))
    assert all(view.untyped_storage().data_ptr() == page.untyped_storage().data_ptr() for view in views)
    assert (page == -1).sum() == layout.padded_numel - layout.numel


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_bytes(dtype: torch.dtype) -> None:
    layout = _layout("plain", 3, dtype)  # 12, 5 and 8 elements, each in its own 64 bytes or more
    rooms = {2: 3 * 32, 4: 3 * 16, 8: 16 + 8 + 8}[dtype.itemsize]
    share = -(-rooms // 3)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (25, share, 3 * share)
    assert layout.shard_bytes == share * dtype.itemsize and layout.page_bytes == 3 * share * dtype.itemsize


def test_slots() -> None:
    layout = _layout("large first", 2)
    assert [(slot.name, slot.offset, slot.end) for slot in layout.slots] == [
        ("p0", 0, 527),
        ("p1", 528, 529),
        ("p2", 544, 545),
        ("p3", 560, 560),
        ("p4", 560, 562),
    ]
    assert layout.slots[2].shape == () and layout.slots[2].numel == 1 and layout.slots[3].numel == 0


def _some_tensors() -> list[torch.Tensor]:
    """All sizes of up to three dimensions, in all orders of memory, and with gaps and overlaps."""
    found = []
    for dims in range(4):
        for shape in itertools.product((0, 1, 2, 3), repeat=dims):
            whole = torch.empty(shape)
            found += [whole.permute(order) for order in itertools.permutations(range(dims))]
            found += [torch.empty([2 * size + 1 for size in shape])[tuple(slice(0, size) for size in shape)]]
            found += [torch.empty(1).expand(shape)] if dims else []
    return found


def test_dense_is_what_torch_says_of_the_dimensions_in_memory_order() -> None:
    for tensor in _some_tensors():
        outermost_first = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
        expected = tensor.permute(outermost_first).is_contiguous()
        if tensor.numel():
            assert is_dense(tensor.shape, tensor.stride()) == expected, (tensor.shape, tensor.stride())
        assert is_dense(tensor.shape, row_by_row(tensor.shape))


def test_strides_are_kept_of_other_orders_only() -> None:
    assert strides_of(torch.empty(2, 3)) is None
    assert strides_of(torch.empty(2, 3).t()) == (1, 3)
    assert strides_of(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (60, 1, 15, 3)
    assert strides_of(torch.empty(4, 6)[:, ::2]) is None, "it has gaps"
    assert strides_of(torch.empty(1).expand(2, 2)) is None, "elements share a place"
    assert strides_of(torch.empty(0, 3).t()) == (1, 3)


# ---- whole parameters
OWNERS = [
    (0, 0, 1, 1, 2),
    (0, 1, 1, 1, 1),
    (2, 2, 2, 2, 2),
    (0, 0, 0, 0, 3),
]


def _whole_layout(name: str, shard_of: tuple[int, ...], world: int = 4, even: bool = False) -> Layout:
    shapes = SHAPES[name]
    named = [(f"p{i}", torch.Size(shape)) for i, shape in enumerate(shapes)]
    return Layout(named, torch.float32, world, shard_of=shard_of[: len(shapes)], even=even)


@pytest.mark.parametrize("even", (False, True))
@pytest.mark.parametrize("shard_of", OWNERS)
@pytest.mark.parametrize("name", SHAPES)
def test_whole_parameters_lie_in_the_shards_of_their_owners(name: str, shard_of: tuple[int, ...], even: bool) -> None:
    layout = _whole_layout(name, shard_of, even=even)
    for place, slot in enumerate(layout.slots):
        held = [layout.within(slot, rank) for rank in range(4)]
        sizes = [part.stop - part.start for part in held]
        assert sizes == [slot.numel if rank == shard_of[place] else 0 for rank in range(4)]
        assert layout.shard_with(place) == shard_of[place]
        piece, span = layout.piece(slot, shard_of[place]), layout.span(shard_of[place])
        assert (span.start + piece.start, span.start + piece.stop) == (slot.offset, slot.end)
        assert slot.offset % 16 == 0, "it begins where torch's allocator might have put it"
    spans = [layout.span(rank) for rank in range(4)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(layout.padded_numel))
    assert layout.offsets == sorted(layout.offsets)
    for rank in range(4):
        assert sum(layout.runs(rank)) == layout.shard_sizes[rank]


def test_shards_are_as_long_as_what_they_have() -> None:
    layout = _whole_layout("plain", (0, 2, 2))  # 12, 5 and 8 elements, each in 16
    assert layout.shard_sizes == (16, 16, 32, 16), "no shard is empty"
    assert (layout.padded_numel, layout.shard_numel, layout.page_bytes) == (80, 32, 320)
    assert [layout.bytes_of(rank) for rank in range(4)] == [64, 64, 128, 64]
    assert _whole_layout("plain", (0, 2, 2), even=True).shard_sizes == (32, 32, 32, 32)


def test_whole_parameters_of_one_owner_and_size_are_cut_alike() -> None:
    named = [(f"p{i}", torch.Size([3, 4])) for i in range(3)]
    layout = Layout(named, torch.float32, 2, shard_of=(0, 0, 1))
    cut = Layout(named, torch.float32, 2)
    assert layout.cuts[0] == layout.cuts[1] != layout.cuts[2]
    assert cut.cuts[0] == layout.cuts[0] and cut.shard_with(0) is None
    assert Layout(named, torch.float32, 1).shard_with(2) == 0
