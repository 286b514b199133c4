"""Which ways share a process group, and what goes along them."""

import pytest
import torch

from retrograde.pipeline.generators import generate
from retrograde.pipeline.relay import ways_of
from retrograde.transport import Way
from retrograde.transport.lanes import as_bytes, dealt


def _line(ranks: int) -> list[Way]:
    return sorted(way for rank in range(ranks - 1) for way in (Way(rank, rank + 1), Way(rank + 1, rank)))


@pytest.mark.parametrize(("ranks", "groups"), ((2, 2), (3, 4), (4, 4), (8, 4)))
def test_a_rank_has_one_lane_in_a_group(ranks: int, groups: int) -> None:
    ways = _line(ranks)
    found = dealt(ways)
    assert sorted(way for group in found for way in group) == ways
    for group in found:
        ends = [rank for way in group for rank in way]
        assert len(ends) == len(set(ends))
    assert len(found) == groups


def test_bytes_as_they_are_sent() -> None:
    """In memory order; what torch has left to be done when it is read is done."""
    grid = torch.arange(12.0).view(3, 4)
    turned = as_bytes(grid.t())
    assert turned.data_ptr() == grid.data_ptr() and turned.dtype is torch.uint8 and turned.shape == (48,)
    assert as_bytes(grid[:, ::2]).view(torch.float32).tolist() == [0, 2, 4, 6, 8, 10]
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert as_bytes(values.conj()).view(torch.complex64).tolist() == [1 - 2j, 3 + 1j]
    assert as_bytes(values.conj().imag).view(torch.float32).tolist() == [-2.0, 1.0]
