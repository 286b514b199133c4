"""Which pages a program may use again without wanting them: a function of W and the policy, never of reference counts.

If it depended on what a rank happens to hold, a garbage collection would make that rank stray. So a page that is still
there on one rank takes part in the gather all the same, and its copy is thrown away.
"""

from collections.abc import Mapping


class Residency:
    """Pages that came by collectives since the last boundary, within a budget beside the last one; oldest first out.

    Where backward uses units in the reverse order of forward, the oldest page is the one that is used last: no choice
    is better. Pages that are used without being wanted are not in W, so the order cannot go by how long ago that was.
    """

    def __init__(self, budget: float = 0, sizes: Mapping[int, int] | None = None) -> None:
        """The budget is in the unit of `sizes`; without them it counts pages."""
        self._budget = budget
        self._sizes = sizes
        self._units: dict[int, None] = {}  # in the order of W
        self._total = 0

    def has(self, unit: int) -> bool:
        return unit in self._units

    def gathered(self, unit: int) -> None:
        """In the order of W."""
        self._remove(unit)
        while self._units and self._total > self._budget:
            self._remove(next(iter(self._units)))
        self._units[unit] = None
        self._total += self._size(unit)

    def clear(self) -> None:
        self._units.clear()
        self._total = 0

    def _remove(self, unit: int) -> None:
        if unit in self._units:
            del self._units[unit]
            self._total -= self._size(unit)

    def _size(self, unit: int) -> int:
        return 1 if self._sizes is None else self._sizes[unit]
