"""What ranks say at a meeting about gradients they have sent, and what follows from it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

from retrograde.gradients.keys import by_key
from retrograde.pages import Unit
from retrograde.transport import Key, Offers, Position, Reason, Transport, Use, Uses, Value


def accumulated(offers: Mapping[int, Uses]) -> tuple[bool, ...]:
    """For each parameter, whether its gradient goes to `.grad` on any rank."""
    return tuple(Use.ACCUMULATED in uses for uses in zip(*offers.values(), strict=True))


def end_of_backward(number: int, needed: Iterable[Key] | None) -> Value:
    """What a rank says at the end of a backward: the number of that backward, and the keys of the sums that cannot
    wait; None: no sum can wait."""
    return [number, None if needed is None else [_said(key) for key in needed]]


def _said(key: Key) -> list[int]:
    return [key.unit, key.meeting, key.attempt, key.turn, key.backward]


class Due:
    """Says which of the gradients that ranks have sent a meeting adds up.

    Where parts of sums may come later (flow.py, Rule 5) a meeting at the end of a backward adds up only those that
    cannot wait. Whatever else was put is added up where no rank is in a backward, on top of what all calls have
    brought: so all ranks that hold a shard add the same numbers in the same order."""

    def __init__(self, last: float, needed: frozenset[Key] | None) -> None:
        """`last`: the lowest number of the backwards at whose ends ranks are; what was sent up to that one is due.
        `needed`: the keys of that which are due; None: all."""
        self._last = last
        self._needed = needed

    @classmethod
    def at(cls, positions: Sequence[Position]) -> Self:
        last = math.inf
        needed: frozenset[Key] | None = None
        for number, keys in _ended(positions):
            last = min(last, number)
            if keys is not None:
                needed = keys if needed is None else needed | keys
        return cls(last, needed)

    def has(self, key: Key) -> bool:
        return key.backward <= self._last and (self._needed is None or key in self._needed)


def _ended(positions: Sequence[Position]) -> Iterator[tuple[int, frozenset[Key] | None]]:
    for position in positions:
        if position.reason is Reason.BACKWARD:
            assert isinstance(position.value, Sequence)
            number, keys = position.value
            assert isinstance(number, int)
            yield number, None if keys is None else frozenset(Key(*key) for key in keys)  # type: ignore[union-attr, misc]


def runs_hooks(positions: Sequence[Position]) -> bool:
    """Do the gradients that a meeting for a step adds up come to a unit that has hooks on any rank?"""
    hooked = {unit for position in positions for unit in position.value or ()}  # type: ignore[union-attr]
    return any(key.unit in hooked for position in positions for key in (*position.sent, *position.pending))


def due_offers(positions: Sequence[Position]) -> dict[int, Offers]:
    """By rank, the offers that a meeting adds up, and those that were withdrawn, which have no uses."""
    due = Due.at(positions)
    return {
        rank: {key: uses for key, uses in position.sent.items() if due.has(key) or not uses}
        for rank, position in enumerate(positions)
    }


def without_withdrawn(offers: Mapping[int, Offers], transport: Transport, units: Sequence[Unit]) -> dict[int, Offers]:
    """Leave out what ranks have withdrawn (`Strategy.withdrawn`).
    Fail if some ranks have withdrawn a gradient and others have not."""
    for key, ranks in by_key(offers).items():
        withdrawn = [rank for rank, uses in ranks.items() if not uses]
        others = [rank for rank in range(transport.world) if rank not in withdrawn]
        if withdrawn and others:
            transport.fail(
                f"rank {transport.rank}: rank {withdrawn[0]} gave up a backward after all ranks had brought "
                f"their gradient of unit {units[key.unit].name}, and rank {others[0]} did not; let all ranks "
                f"give up a backward, or none"
            )
    return {rank: {key: uses for key, uses in sent.items() if uses} for rank, sent in offers.items()}
