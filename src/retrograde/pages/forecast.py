"""What is used after what: learned from use, followed to prefetch and to choose what to evict."""

from collections.abc import Iterator
from typing import NamedTuple

from retrograde.pages.unit import Unit


class Moment(NamedTuple):
    """A use, as the forecast knows it: by the unit that was used before it, and whether in a backward."""

    before: Unit | None
    unit: Unit | None
    backward: bool


NOWHERE = Moment(None, None, False)


class Forecast:
    """Learns which unit is used after which: one pass teaches it, and one pass of another order replaces that."""

    def __init__(self) -> None:
        self._next: dict[Moment, tuple[Unit, bool]] = {}
        self._now = NOWHERE
        self._before: dict[Moment, tuple[Unit, bool] | None] = {}  # what was expected, where this step says otherwise

    def use(self, unit: Unit, backward: bool) -> None:
        if self._now is not NOWHERE:
            self._learn(unit, backward)
        self._now = Moment(self._now.unit, unit, backward)

    def _learn(self, unit: Unit, backward: bool) -> None:
        expected = self._next.get(self._now)
        if expected != (unit, backward):
            self._before.setdefault(self._now, expected)
            self._next[self._now] = unit, backward

    def end_step(self, learned: bool) -> None:
        """End a step, and forget what it has taught unless there was something to learn from it (`learned`)."""
        for moment, expected in {} if learned else self._before.items():
            if expected is None:
                del self._next[moment]
            else:
                self._next[moment] = expected
        self._before.clear()

    def break_off(self) -> None:
        """Forget what was used last. What comes next does not follow from it:
        a step, or the end of a backward, lies between."""
        self._now = NOWHERE

    def ahead(self, limit: int) -> Iterator[Unit]:
        """The units that are expected next. Stops at the end of a backward: a step may come before the next forward."""
        moment = self._now
        for _ in range(limit):
            following, backward = self._next.get(moment, (None, False))
            if following is None or (moment.backward and not backward):
                return
            yield following
            moment = Moment(moment.unit, following, backward)
