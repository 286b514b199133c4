"""How reduced gradients that no Pack waits for come to `.grad`, and whether any have come."""

from collections.abc import Iterable

from retrograde.gradients.gradient import Delivery, Leaves
from retrograde.transport import Use, Uses


class Deliveries:
    """Every unit's way to `.grad`, for gradients that others brought, that waited, or that Pack has missed."""

    def __init__(self) -> None:
        self.fresh = False  # have gradients come since all ranks were last at the same place?
        self._leaves: list[Leaves] = []

    def add(self, leaves: Leaves) -> None:
        """Add the way of a unit that has joined the engine."""
        self._leaves.append(leaves)

    def note(self, uses: Uses) -> None:
        """Note that a backward of this rank brings gradients for these uses."""
        if Use.ACCUMULATED in uses:
            self.fresh = True

    def deliver(self, delivery: Delivery) -> None:
        if any(delivery.wanted):
            self.fresh = True
            self._leaves[delivery.unit.index].deliver(delivery.total, delivery.wanted)

    def deliver_all(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self.deliver(delivery)
