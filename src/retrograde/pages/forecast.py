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
    """A first-order model of pairs: learns in one pass, forgets in one."""

    def __init__(self) -> None:
        self._next: dict[Moment, tuple[Unit, bool]] = {}
        self._now = NOWHERE

    def use(self, unit: Unit, backward: bool) -> None:
        if self._now is not NOWHERE:
            self._next[self._now] = unit, backward
        self._now = Moment(self._now.unit, unit, backward)

    def break_off(self) -> None:
        """What comes next does not follow from what was before: a step, or the end of a backward, lies between."""
        self._now = NOWHERE

    def ahead(self, limit: int) -> Iterator[Unit]:
        """Units expected next. Stops at the end of a backward: a step may come before the next forward."""
        moment = self._now
        for _ in range(limit):
            following, backward = self._next.get(moment, (None, False))
            if following is None or (moment.backward and not backward):
                return
            yield following
            moment = Moment(moment.unit, following, backward)
