"""When a page may go: whoever holds a view of it keeps it, whatever else held one while it came."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from retrograde.devices.simulated import SimulatedDevice
from retrograde.pages import Unit
from tests.streams.programs import Done, Rank


def test_views_of_a_receiving_thread_are_not_the_units_own() -> None:
    rank = Rank(SimulatedDevice(), 1, 1)
    unit, received = rank.units[0], []

    def read(unit: Unit, page: Tensor, alone: bool) -> Done:
        received.append(
            page[unit.layout.span(1)]
        )  # the thread that receives has not let go of it when the page is ready
        return Done()

    peer: Any = rank.peer
    peer.read = read
    unit.load()
    unit.finish_loading()
    received.clear()
    view = unit.page.memory[:2]
    assert not unit.drop_unless_held()
    del view
    assert unit.drop_unless_held()
