"""What many ranks have said, as one message: every verdict is an associative reduction.

[Note: folding]
A rank in the tree hears its own member and the ranks below it. What it hears of one kind it merges into one message of
the same kind, which says for how many ranks it stands. Messages are *cumulative*: a later one of the same sender
replaces the earlier one, so a partial verdict may go up first and the complete one later.
"""

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import TypeVar

import msgspec

from retrograde.transport.order.messages import Arrive, MeetingPlace, Nudge, Surprise, Tally, Usage
from retrograde.transport.order.wants import SOFT_STEP, STEP, Boundary

MOST_PLACES = 4

M = TypeVar("M", Surprise, Nudge, Arrive)


def merge_surprises(one: Surprise, other: Surprise) -> Surprise:
    alike = (one.length, one.want) == (other.length, other.want)
    return Surprise(one.period, one.count + other.count, max(one.length, other.length), one.want if alike else None)


def merge_nudges(one: Nudge, other: Nudge) -> Nudge:
    """Merge two nudges. `until` is that of the longest: only who has a W of this length knows what follows."""
    length, until = max((one.length, one.until), (other.length, other.until))
    return Nudge(one.period, one.count + other.count, length, until)


def merge_arrivals(most_names: int, one: Arrive, other: Arrive) -> Arrive:
    return Arrive(
        one.period,
        one.count + other.count,
        one.offers + other.offers,
        max(one.invitation, other.invitation),
        max(one.length, other.length),
        one.quiet and other.quiet,
        one.denied or other.denied,
        one.digest if one.digest == other.digest else None,
        _merge_names(one.putters, other.putters, most_names),
        _merge_places(one.places, other.places),
        merge_tallies(one.tallies, other.tallies),
    )


def _merge_names(one: tuple[int, ...] | None, other: tuple[int, ...] | None, most: int) -> tuple[int, ...] | None:
    if one is None or other is None or len(one) + len(other) > most:
        return None
    return tuple(sorted(one + other))


def _merge_places(one: tuple[MeetingPlace, ...], other: tuple[MeetingPlace, ...]) -> tuple[MeetingPlace, ...]:
    """Merge places. Those that are no steps come first, so that they are not lost: they decide what the boundary is."""
    found: dict[tuple[Boundary, str], MeetingPlace] = {}
    for place in sorted(one + other, key=lambda place: (place.boundary == STEP, place.rank)):
        found.setdefault((place.boundary, place.name), place)
    return tuple(found.values())[:MOST_PLACES]


def merge_tallies(one: tuple[Tally, ...], other: tuple[Tally, ...]) -> tuple[Tally, ...]:
    """Merge tallies, unit by unit. A unit that one side does not name was not used there."""
    if not one and not other:
        return ()
    left = {tally.unit: tally for tally in one}
    right = {tally.unit: tally for tally in other}
    merged = []
    for unit in sorted(left.keys() | right.keys()):
        unused = Tally(unit, Usage(), Usage(), False)
        merged.append(_merge_tally(left.get(unit, unused), right.get(unit, unused)))
    return tuple(merged)


def _merge_tally(one: Tally, other: Tally) -> Tally:
    return Tally(
        one.unit,
        _each(min, one.least, other.least),
        _each(max, one.most, other.most),
        one.denied or other.denied,
    )


def _each(choose: Callable[[int, int], int], one: Usage, other: Usage) -> Usage:
    return Usage(
        choose(one.gathers, other.gathers),
        choose(one.reductions, other.reductions),
        choose(one.uses, other.uses),
    )


def common_boundary(places: Iterable[MeetingPlace]) -> Boundary:
    """The boundary of ranks that came to these places: a step only if all came for one.
    Else those who did come again."""
    return STEP if all(place.boundary == STEP for place in places) else SOFT_STEP


class Fold:
    """What has been heard in this period, by sender, and what it comes to."""

    def __init__(self, most_names: int) -> None:
        self._most_names = most_names
        self.surprises: dict[int, Surprise] = {}
        self.nudges: dict[int, Nudge] = {}
        self.arrivals: dict[int, Arrive] = {}
        self.declined = 0  # the last invitation that is over; they are numbered from 1

    def hear_arrival(self, source: int, arrival: Arrive) -> None:
        if arrival.offers and arrival.invitation <= self.declined:
            arrival = _without_offers(arrival)
        if arrival.count or arrival.offers:
            self.arrivals[source] = arrival

    # ---- what it comes to
    @property
    def surprise(self) -> Surprise | None:
        return _merged(merge_surprises, self.surprises)

    @property
    def nudge(self) -> Nudge | None:
        return _merged(merge_nudges, self.nudges)

    @property
    def arrival(self) -> Arrive | None:
        return _merged(partial(merge_arrivals, self._most_names), self.arrivals)

    @property
    def arrived(self) -> int:
        return sum(arrival.count for arrival in self.arrivals.values())

    @property
    def present(self) -> int:
        return sum(arrival.count + arrival.offers for arrival in self.arrivals.values())

    def is_loud(self) -> bool:
        """Has anybody contributed to a reduction in this period who is here now?"""
        return not all(arrival.quiet for arrival in self.arrivals.values())

    # ---- what was decided
    def granted(self) -> None:
        """Forget surprises and nudges after a grant. All ranks were at its place: nobody waits for a call before it,
        and what was said of later ones is void."""
        self.surprises.clear()
        self.nudges.clear()

    def closed(self, length: int) -> None:
        self.surprises.clear()
        self.nudges = {source: nudge for source, nudge in self.nudges.items() if nudge.length > length}

    def decline(self, number: int) -> None:
        self.declined = max(self.declined, number)
        self.arrivals = {source: _without_offers(arrival) for source, arrival in self.arrivals.items() if arrival.count}

    def clear(self) -> None:
        self.surprises.clear()
        self.nudges.clear()
        self.arrivals.clear()


def _merged(merge: Callable[[M, M], M], said: dict[int, M]) -> M | None:
    return reduce(merge, said.values()) if said else None


def _without_offers(arrival: Arrive) -> Arrive:
    return msgspec.structs.replace(arrival, offers=0)
