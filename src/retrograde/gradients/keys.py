"""Names of gradients: ranks that do the same things since a meeting come to the same ones."""

from collections import Counter
from collections.abc import Mapping

from retrograde.pages import Unit
from retrograde.transport import Key, Offers, Transport, Uses

FLUSHED = 0  # the turn of what a meeting asks for


class Keys:
    """Makes the keys of this rank's gradients.

    Turns count a unit's gradients since the last meeting or the last end of a backward, whichever came later: even ones
    are sent in their backward, odd ones went early in a window.
    Where every backward ends with a meeting, `backward` stays 0."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._meeting = 0
        self._attempt = 0
        self.backward = 0  # how many backwards have ended since the last meeting
        self._turns: Counter[tuple[int, bool]] = Counter()

    def next(self, unit: Unit, goes_early: bool = False) -> Key:
        """The key of a gradient that is sent now."""
        if self._meeting != self._transport.meetings:
            self._meeting = self._transport.meetings
            self._attempt = 0
            self.backward = 0
            self._turns.clear()
        self._turns[unit.index, goes_early] += 1
        turn = 2 * self._turns[unit.index, goes_early] + goes_early
        return Key(unit.index, self._meeting, self._attempt, turn, self.backward)

    def end_backward(self) -> None:
        """Count a backward that has sent something and has ended:
        the k-th of one rank goes with the k-th of each other."""
        if self._meeting == self._transport.meetings:
            self.backward += 1
            self._turns.clear()

    def at_next_meeting(self, index: int) -> Key:
        """The key of a waiting gradient of unit `index`, for which the next meeting may ask."""
        return Key(index, self._transport.meetings + 1, 0, FLUSHED)

    def give_up(self) -> None:
        """Count another attempt, so that what is sent next has other keys:
        others may still get parts of what was given up."""
        self._attempt += 1
        self._turns.clear()


def by_key(offers: Mapping[int, Offers]) -> dict[Key, dict[int, Uses]]:
    """rank -> key -> uses, turned into key -> rank -> uses, in the same order on all ranks."""
    keys = sorted({key for of_rank in offers.values() for key in of_rank})
    return {key: {rank: of_rank[key] for rank, of_rank in offers.items() if key in of_rank} for key in keys}
