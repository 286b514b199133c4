"""What comes next in a sequence, as far as its past tells.

[Note: prediction]
The longest of a few lengths at which the end of the sequence has been seen before is looked up; what came after it then
is expected now, and *followed* for as long as it is right.

Rule P1: the prediction is a function of the sequence alone. Ranks with the same sequence expect the same.
Rule P2: it is consistent: whoever accepts i predictions, one by one, comes to what `peek(i)` said before. That is why
         an occurrence is followed, and not looked up anew at every entry.
Rule P3: the past is bounded. It has two generations; when the younger is full the elder is forgotten. That happens only
         where the caller says so, across which nobody may have peeked (it would break P2).
"""

from collections.abc import Callable, Iterable
from typing import Self

LENGTHS = (16, 8, 4, 2, 1)

Ending = tuple[int, ...]


class Predictor:
    """A sequence of numbers and what it lets one expect. Places are counted from the very first entry."""

    def __init__(self, generation: int, past: Iterable[int] = ()) -> None:
        self._generation = generation
        self._entries: list[int] = []
        self._forgotten = 0  # entries that are no longer in the list
        self._younger_from = 0
        self._younger: dict[Ending, int] = {}  # where the last occurrence of an ending ends
        self._elder: dict[Ending, int] = {}
        self._following: int | None = None  # the place of what is expected next
        for entry in past:
            self.append(entry)

    def append(self, entry: int, may_forget: bool = False) -> bool:
        """Add an entry. Returns whether something was forgotten."""
        forgets = may_forget and self._end - self._younger_from >= self._generation
        if forgets:
            self._forget()
        right = self.peek() == entry
        self._entries.append(entry)
        self._following = self._following + 1 if right and self._following is not None else None
        for length in LENGTHS:
            if len(self._entries) < length:
                continue
            ending = tuple(self._entries[-length:])
            if self._following is None:
                self._following = self._younger.get(ending, self._elder.get(ending))
            self._younger[ending] = self._end
        return forgets

    def peek(self, ahead: int = 0) -> int | None:
        """What is expected so many entries ahead. Beyond the end of the sequence, what is followed begins again."""
        if self._following is None:
            return None
        first = self._following - self._forgotten
        return self._entries[first + ahead % (len(self._entries) - first)]

    def without(self, is_unwanted: Callable[[int], bool]) -> Self:
        """A predictor for which these entries have never been."""
        return type(self)(self._generation, (entry for entry in self._entries if not is_unwanted(entry)))

    def entries(self) -> tuple[int, ...]:
        """What is remembered, oldest first."""
        return tuple(self._entries)

    @property
    def following(self) -> int | None:
        return self._following

    @property
    def _end(self) -> int:
        return self._forgotten + len(self._entries)

    def _forget(self) -> None:
        del self._entries[: self._younger_from - self._forgotten]
        self._forgotten = self._younger_from
        self._younger_from = self._end
        self._elder, self._younger = self._younger, {}
        if self._following is not None and self._following < self._forgotten:
            self._following = None
