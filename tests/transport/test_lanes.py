"""Which ways share a process group, and what goes along them."""

from typing import Any

import pytest
import torch

from retrograde.pipeline.generators import GENERATORS, generate
from retrograde.pipeline.loss_path import LossPath, ways_of
from retrograde.transport import Way
from retrograde.transport.lanes import as_bytes, dealt
from retrograde.transport.messages import Address


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


class _Mail:
    """A transport of which all ranks share the messages; says which ways were taken."""

    def __init__(self) -> None:
        self.sent: dict[Way, Any] = {}
        self.rank = 0

    def send(self, peer: int, address: Address, content: Any) -> None:
        self.sent[Way(self.rank, peer)] = content

    def receive(self, peer: int, address: Address) -> Any:
        return lambda: self.sent[Way(peer, self.rank)]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_the_loss_goes_to_all_ranks_by_ways_of_gradients(name: str, ranks: int) -> None:
    schedule = generate(name, ranks, 12)
    mail: Any = _Mail()
    loss = torch.tensor(3.0)
    last = schedule.placement[-1]
    found = {}
    for rank in dict.fromkeys(reversed(schedule.placement)):  # each after the one that it hears of it from
        mail.rank = rank
        found[rank] = LossPath(schedule, rank, mail).share(loss if rank == last else None)
    assert found == dict.fromkeys(range(ranks), loss)
    assert set(mail.sent) <= set(ways_of(schedule)) and len(mail.sent) == ranks - 1
