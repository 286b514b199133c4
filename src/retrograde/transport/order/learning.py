"""Which units do not fit into an agreed order, learned by rank 0.

Experts that ranks use differently would surprise the ranks at every step. A unit that is blamed twice within a few
steps becomes *volatile*: one-sided on all ranks. It is tried again after 8, 16, 32, ... steps in which ranks used it
alike.
"""

from collections import Counter
from collections.abc import Iterable

from retrograde.transport.order.messages import Tally

BLAME = 4


class Learning:
    """Scores units by how often they are to blame (Rule 9)."""

    volatile_at = 7  # two blames, if not more than one clean step lies between them

    def __init__(self) -> None:
        self.volatile: frozenset[int] = frozenset()
        self._scores: Counter[int] = Counter()
        self._times: Counter[int] = Counter()  # how often a unit became volatile

    def clean_period(self) -> None:
        """Learn from a period in which ranks did the same."""
        self._update(set(self._scores), blamed=set(), differing=set())

    def period(self, tallies: Iterable[Tally]) -> None:
        """Learn from a period in which ranks did not do the same."""
        tallies = list(tallies)
        units = {tally.unit for tally in tallies}
        differing = {tally.unit for tally in tallies if tally.least != tally.most}
        denied = {tally.unit for tally in tallies if tally.denied}
        blamed = self._to_blame(units, differing - self.volatile or denied)
        self._update(units | set(self._scores), blamed, differing)

    def _to_blame(self, units: set[int], suspects: set[int]) -> set[int]:
        """The units to blame: the suspects, unless they are most units. Then it is a rank that strays."""
        return set() if 2 * len(suspects) > len(units) else suspects

    def _update(self, units: set[int], blamed: set[int], differing: set[int]) -> None:
        for unit in sorted(units):
            self._scores[unit] = self._scores[unit] + BLAME if unit in blamed else max(0, self._scores[unit] - 1)
            if unit in self.volatile:
                self._try_again(unit, unit in differing)
            elif self._scores[unit] >= self.volatile_at:
                self.volatile |= {unit}
                self._times[unit] += 1
                self._scores[unit] = self._pause(unit)
            if not self._scores[unit]:
                del self._scores[unit]

    def _try_again(self, unit: int, differs: bool) -> None:
        if differs:
            self._scores[unit] = self._pause(unit)
        elif not self._scores[unit]:
            self.volatile -= {unit}

    def _pause(self, unit: int) -> int:
        return BLAME << min(self._times[unit], 16)
