"""Coherence: which state of the shards a reader may see, and when a writer may write.

[Note: fences]
Pages are read from other ranks without their main thread taking part, so something must stop a rank from
changing a shard that another still has to read, and from reading one that its owner has yet to change.
Between two *fences* shards are only read; writing needs a fence, a meeting at which every rank says that it
has read all it wanted. An optimizer step is a fence; so is the first in-place edit of a weight after a read
(`clamp_`, EMA, manual SGD), which the tensors users hold report before it happens (optim/pieces.py,
residency/full.py). The clock counts fences and is the same on all ranks.

Rule 1: a request names the clock. An owner that is behind answers when it has caught up; one that is ahead
        refuses: the reader missed a fence.
Rule 2: during a step nothing is served. During edits, a unit is served once it has had as many edits as
        the reader's, or when the owner is seen reading again (its edits are over).
Rule 3: having served or read a page, the next write needs a new fence.
Rule 4: an edit nobody reported (through an alias of a leaf) still moves the leaf's version counter: readers
        and owners compare how many such stray edits they saw.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

from retrograde.comm import Stamp, Station

if TYPE_CHECKING:
    from retrograde.residency.unit import Unit


class Phase(Enum):
    READ = auto()
    EDIT = auto()
    STEP = auto()


class Gate:
    def __init__(self, station: Station, units: list["Unit"], fence: Callable[[str], None]) -> None:
        self.clock = 0
        self._units = units
        self._station = station
        self._fence = fence
        self._phase = Phase.READ
        self._read_since = True

    # ---- the main thread
    def stamp(self, unit: "Unit") -> Stamp:
        """What a page read now must contain. Reading ends the edits before it."""
        with self._station.mesh.changed:
            if self._phase is not Phase.READ:
                self._settle()
            self._read_since = True
        return Stamp(self.clock, unit.edits, unit.version - unit.settled)

    def before_write(self, what: str) -> None:
        with self._station.mesh.changed:
            free = self._phase is not Phase.READ and not self._read_since
        if not free:
            self._fence(what)

    def after_write(self, unit: "Unit") -> None:
        with self._station.mesh.changed:
            if self._phase is Phase.EDIT:
                unit.edits += 1
        self._station.answer_waiting()

    def advance(self, phase: Phase) -> None:
        """A fence was passed by all ranks; this one is about to do `phase`."""
        with self._station.mesh.changed:
            self.clock += 1
            self._phase = phase
            self._read_since = False
            for unit in self._units:
                unit.edits = 0
                unit.settled = unit.version
        self._station.finish_serving()
        self._station.answer_waiting()

    def end_step(self) -> None:
        with self._station.mesh.changed:
            if self._phase is Phase.STEP:
                self._settle()
        self._station.answer_waiting()

    def _settle(self) -> None:
        self._phase = Phase.READ
        for unit in self._units:
            unit.settled = unit.version

    # ---- the service thread
    def admit(self, unit: "Unit", stamp: Stamp) -> str | None:
        """None if `unit`'s shard is what the reader needs, else why not."""
        if stamp.clock < self.clock:
            return f"it has moved on to fence {self.clock} while the reader is still at fence {stamp.clock}"
        if stamp.clock > self.clock or self._phase is Phase.STEP:
            return f"it has not finished the step or edit that the reader has finished (fence {self.clock})"
        if self._phase is Phase.EDIT and unit.edits != stamp.edits:
            return f"it has made {unit.edits} edits of this unit where the reader has made {stamp.edits}"
        if self._phase is Phase.READ and unit.version - unit.settled != stamp.stray:
            return "its weights were not edited in the same way as the reader's"
        self._read_since = True
        return None
