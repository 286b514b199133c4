"""The sum of several ranks' parts: in their order, wherever this rank's own part lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retrograde.devices import Stream
from retrograde.gradients.sums import add_up

NUMEL = 37
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def parts_of(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Of very different sizes, so that every order gives another sum."""
    draw = torch.Generator().manual_seed(count)
    return [(torch.randn(NUMEL, generator=draw) * 10.0 ** (-3 * number % 8)).to(dtype) for number in range(count)]


def summed(parts: list[Tensor], wide: torch.dtype, divisor: int) -> Tensor:
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = (total + part).to(wide)
    return total / divisor


@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("travels", "stays"), [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP64, FP64), (FP32, FP64), (FP64, FP32)]
)
def test_the_order_is_that_of_the_parts(travels: torch.dtype, stays: torch.dtype, count: int, divisor: int) -> None:
    parts = parts_of(count, travels)
    before = [part.clone() for part in parts]
    own = torch.empty(NUMEL, dtype=stays)
    add_up([[part] for part in parts], own, divisor, Stream())
    wide = FP64 if stays is FP64 else FP32
    assert own.equal(summed(before, wide, divisor).to(stays))
    assert all(part.equal(was) for part, was in zip(parts, before, strict=True))  # some are autograd's


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("travels", "stays"), [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP64, FP32)])
def test_the_result_may_take_the_place_of_any_part(travels: torch.dtype, stays: torch.dtype, count: int) -> None:
    for place in range(count):
        parts = parts_of(count, travels)
        expected = summed(parts, FP32, 3).to(stays)
        own = parts[place] = parts[place].to(stays)
        add_up([[part] for part in parts], own, 3, Stream())
        assert own.equal(expected), f"its part is number {place}"


@pytest.mark.parametrize("lengths", [(NUMEL,), (1, 36), (7, 0, 20, 10)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_part_may_be_in_pieces(lengths: tuple[int, ...], place: int) -> None:
    parts = parts_of(3, FP32)
    expected = summed(parts, FP32, 3)
    own = torch.empty(NUMEL)
    pieces = [piece.clone() for piece in parts[place].split(list(lengths))]
    add_up([pieces if number == place else [part] for number, part in enumerate(parts)], own, 3, Stream())
    assert own.equal(expected)


def test_there_may_be_nothing() -> None:
    own = torch.empty(0)
    add_up([[torch.empty(0)], [torch.empty(0)]], own, 2, Stream())
    assert own.numel() == 0
