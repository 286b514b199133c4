"""How reduced gradients that no Pack waits for come to `.grad`, and whether any have come."""

import contextlib
from collections.abc import Iterable, Iterator

from retrograde.gradients.gradient import Delivery, Leaves
from retrograde.transport import Use, Uses


class Deliveries:
    """Every unit's way to `.grad`, for gradients that others brought, that waited, or that Pack has missed."""

    def __init__(self) -> None:
        self.fresh = False  # have gradients come since all ranks were last at the same place?
        self._leaves: list[Leaves] = []
        self._errors: list[Exception] | None = None  # of hooks, which are raised when all deliveries are made

    def add(self, leaves: Leaves) -> None:
        """Add the way of a unit that has joined the engine."""
        self._leaves.append(leaves)

    def note(self, uses: Uses) -> None:
        """Note that a backward of this rank brings gradients for these uses."""
        if Use.ACCUMULATED in uses:
            self.fresh = True

    @contextlib.contextmanager
    def completed(self) -> Iterator[None]:
        """Make all deliveries inside, whatever a hook raises in one of them: other ranks count on this one, and what
        has been added up is nowhere else. The first error is raised at the end of the outermost of such spans."""
        if self._errors is not None:
            yield
            return
        errors = self._errors = []
        try:
            yield
        finally:
            self._errors = None
            if errors:
                raise errors[0]

    def deliver_all(self, deliveries: Iterable[Delivery]) -> None:
        with self.completed():
            for delivery in deliveries:
                self._deliver(delivery)

    def _deliver(self, delivery: Delivery) -> None:
        if not any(delivery.wanted):
            return
        self.fresh = True
        try:
            self._leaves[delivery.unit.index].deliver(delivery.total, delivery.wanted)
        except Exception as error:
            assert self._errors is not None, "deliveries are made together"
            self._errors.append(error)
