"""Windows: which gradients wait in one, and which are reduced early so that its budget holds.

[Note: who is reduced early]
A loop comes back to its units in the same order. If the oldest went early, every unit would be reduced just before its
next gradient, and a budget for all units but one would save nothing. So the first to come stay and a unit that
does not fit is reduced in its own backward, as outside a window: of n units, k that fit are reduced once and the
others every time. Only a unit that has not come since the new one was last here is cold and goes early, the
oldest first.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping


class Windows:
    """The open windows (their budgets, in bytes) and when each unit last had a gradient."""

    def __init__(self) -> None:
        self.open: list[float] = []
        self._came: dict[int, int] = {}
        self._gradients = 0

    @contextlib.contextmanager
    def window(self, budget: float) -> Iterator[None]:
        """Windows nest: the smallest budget counts, and only the end of the outermost is an end."""
        self.open.append(budget)
        try:
            yield
        finally:
            self.open.pop()

    @property
    def budget(self) -> float:
        """Bytes that may wait; infinite without a window that says so."""
        return min(self.open, default=math.inf)

    def admit(self, unit: int, need: int, waiting: Mapping[int, int]) -> list[int] | None:
        """Which units must be reduced early for `unit` to wait beside those `waiting` (bytes by unit);
        None: it cannot wait."""
        self._gradients += 1
        before = self._came.get(unit, 0)
        self._came[unit] = self._gradients
        free = self.budget - sum(waiting.values())
        if unit in waiting:
            return []
        cold = sorted((self._came.get(other, 0), other) for other in waiting)
        early = []
        for came, other in cold:
            if free >= need or came >= before:
                break
            early.append(other)
            free += waiting[other]
        return early if free >= need else None
