"""Who is still there, and what went wrong first.

[Note: the first cause]
When a rank dies, others raise because of it and leave, and more raise because of these. All must name the rank that
died. So a rank that finds a connection lost waits for a moment (`GRACE`), in which it may hear what its other side, or
anybody, knows to have gone wrong before, or that the other side had finished. Then it decides on a cause, tells all
ranks, and only then its own main thread, which may raise and leave. Whoever has heard of a cause keeps to it.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

GRACE = 0.1  # seconds between a lost connection and its being blamed
GONE = "so its process ended or gave up; its own output says why"


class Cause(NamedTuple):
    """What went wrong first: with which rank, in words, and the error by which it was noticed here."""

    rank: int
    text: str
    error: Exception


class _Suspicion(NamedTuple):
    """A lost connection that may be the consequence of something else; at `until` it counts as a cause."""

    until: float
    peer: int


class Liveness:
    """What one rank knows of the others. Its callers hold `Connections.changed`."""

    def __init__(self, peers: Iterable[int]) -> None:
        self.present = set(peers)  # ranks that can be reached, as far as is known
        self.departed: set[int] = set()  # ranks that have said goodbye
        self.cause: Cause | None = None
        self._suspicions: list[_Suspicion] = []  # oldest first

    @property
    def in_doubt(self) -> bool:
        return bool(self._suspicions)

    @property
    def needed_by_nobody(self) -> bool:
        """Has everybody said goodbye, or does it no longer matter who has?"""
        return self.present <= self.departed or self.cause is not None

    def lose(self, peer: int) -> None:
        """Note that a rank cannot be reached any more. Others may know better why."""
        self.present.discard(peer)
        self._suspicions.append(_Suspicion(time.monotonic() + GRACE, peer))

    def accept(self, cause: Cause) -> bool:
        """Take this for what went wrong first, unless something else is known already. Returns whether it was taken."""
        self._suspicions.clear()
        if self.cause is not None:
            return False
        self.cause = cause
        return True

    def seconds_in_doubt(self) -> float:
        return max(0.0, self._suspicions[0].until - time.monotonic())

    def oldest_doubt(self) -> int:
        """The rank that was lost first, of those about which nobody has said anything. It is not in doubt any more."""
        return self._suspicions.pop(0).peer

    def trust_the_departed(self) -> None:
        """Suspect those that have said goodbye no more:
        this rank leaves, so it is as it should be that they are gone too."""
        self._suspicions = [each for each in self._suspicions if each.peer not in self.departed]
