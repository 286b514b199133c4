"""The ledger records what was paged in, dropped, exchanged and agreed, in order, with bytes.

One record serves the tests, the planner's checks, traces and error messages. `bytes` of an entry is what
crossed the wire *into or out of this rank* for it; `resident` and `peak` count bytes of pages in memory
beyond the shards.
"""

from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple

from retrograde.arguments import instance, one_of

HISTORY = 100_000


class Activity(StrEnum):
    """What an entry of the ledger is about."""

    GATHER = "gather"  # a page was requested from the other ranks
    DROP = "drop"  # a page's memory was given back
    REDUCE = "reduce"  # a unit's gradient was exchanged and summed into the shard
    JOIN = "join"  # a unit's gradient came from other ranks only
    AGREE = "agree"  # ranks met (a few bytes): end of a backward, a step, a fence, a norm


class Entry(NamedTuple):
    """One thing that happened: what, to which unit, with how many bytes."""

    kind: Activity
    unit: str
    bytes: int


class Ledger:
    """An append-only list of entries with running totals. Entries beyond `HISTORY` keep only their totals.

    Equal entries are one object, since steps are alike and make equal entries."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=HISTORY)
        self.resident = 0
        self.peak = 0
        self._known: dict[Entry, Entry] = {}
        self._times: Counter[Entry] = Counter()

    def record(self, kind: Activity, unit: str, nbytes: int = 0) -> None:
        entry = Entry(kind, unit, nbytes)
        entry = self._known.setdefault(entry, entry)
        self.entries.append(entry)
        self._times[entry] += 1

    def hold(self, nbytes: int) -> None:
        """Note that memory for pages was taken (positive) or given back (negative)."""
        self.resident += nbytes
        self.peak = max(self.peak, self.resident)

    def count(self, kind: str, unit: str | None = None) -> int:
        """How many entries of a kind there were, with one unit or with all."""
        return sum(self._times[entry] for entry in self._of(kind, unit))

    def bytes(self, kind: str, unit: str | None = None) -> int:
        """The bytes of all entries of a kind, with one unit or with all."""
        return sum(self._times[entry] * entry.bytes for entry in self._of(kind, unit))

    def clear(self) -> None:
        """Forget entries and totals; what is resident now becomes the peak."""
        self.entries.clear()
        self._known.clear()
        self._times.clear()
        self.peak = self.resident

    def _of(self, kind: str, unit: str | None) -> list[Entry]:
        kinds = [entry.value for entry in Activity]
        one_of("kind", kind, kinds, ", ".join(kinds))
        if unit is not None:
            instance("unit", unit, str, "is not a name", "a unit's name or None")
        return [entry for entry in self._times if entry.kind == kind and unit in (None, entry.unit)]
