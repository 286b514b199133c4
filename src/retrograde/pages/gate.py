"""Coherence: which state of the shards a reader may see, and when a writer may write.

[Note: fences]
Pages are read from other ranks without their main thread taking part, so something must stop a rank from
changing a shard that another still has to read, and from reading one that its owner has yet to change.
Between two *fences* shards are only read; writing needs a fence, a meeting at which every rank says that it
has read all it wanted. An optimizer step is a fence; so is the first in-place edit of a weight after a step
(`clamp_`, EMA, manual SGD), which the tensors users hold report before it happens (parameters/pieces.py,
pages/full_tensor.py). The clock counts fences and is the same on all ranks.

Rule 1: a request names the clock. An owner that is behind answers when it has caught up; one that is ahead
        refuses: the reader missed a fence.
Rule 2: during a step nothing is served. Edits are counted, unit by unit, and a reader names how many it has made:
        an owner that has made fewer answers when it has caught up, one that has made more undoes them in a copy.
        So ranks may edit at their own pace, and read in between or not.
Rule 3: the first edit after a step needs a fence; so does editing a parameter a second time, which bounds what is kept
        for undoing by one shard. Only edits count, which all ranks make alike: what a rank has read is its own affair,
        and a rank that counted it would wait at a fence for others that have no reason to come. So from the first
        edit to the next step owners send copies.
Rule 4: an edit nobody reported (through an alias of a leaf) still moves the leaf's version counter: readers
        and owners compare how many such stray edits they saw.
Rule 5: an edit of a full tensor that nobody reported (`torch._foreach_mul_`, `out=`) moves the full tensor's counter.
        It becomes a reported one when its rank next looks (unit.py). Until then, where pages stay, the shard is not
        served: its old values are gone, and who still needs them is told so.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from retrograde.transport import Reading, Reason, Stamp, Station

if TYPE_CHECKING:
    from retrograde.pages.unit import Unit


class Gate:
    def __init__(self, station: Station, units: list["Unit"], fence: Callable[[str], None]) -> None:
        self.clock, self._station, self._units, self._fence = 0, station, units, fence
        station.serve = self.shard_for
        station.elements = self.shard_numel
        self._phase: Reason | None = None  # what is being written: a step, or edits (a fence)

    # ---- the main thread
    def read(self, unit: "Unit", into: Callable[[int], torch.Tensor]) -> Reading:
        """Start reading the page as this rank sees it now. Reading ends a step, in whose hooks it may be done."""
        if self._phase is Reason.STEP:
            self.settle()
        self._station.answer_waiting()
        stamp = Stamp(self.clock, unit.edits, unit.version - unit.settled)
        return self._station.read(unit.index, unit.name, stamp, into)

    @contextlib.contextmanager
    def writing(self, what: str, unit: "Unit", slot: int) -> Iterator[None]:
        """Around an edit of a parameter in place."""
        if self._phase is None or slot in unit.undo:
            self._fence(what)
        with self._station.mesh.changed:
            if self._phase is Reason.FENCE:
                unit.undo[slot] = unit.pieces[slot].clone()
        version = unit.pieces[slot]._version
        try:
            yield
        except BaseException:
            with self._station.mesh.changed:
                while len(unit.undo) > unit.edits - unit.fenced:
                    unit.undo.popitem()
            raise
        with self._station.mesh.changed:
            unit.edits = unit.fenced + len(unit.undo)
            unit.settled += unit.pieces[slot]._version - version  # it was reported
        self._station.answer_waiting()

    def advance(self, phase: Reason | None) -> None:
        """A fence was passed by all ranks; this one is about to write, or not."""
        with self._station.mesh.changed:
            self.clock += 1
            for unit in self._units:
                unit.edits = 0 if phase is Reason.STEP else unit.edits  # all ranks are here, whatever each has edited
                unit.undo, unit.fenced = {}, unit.edits
            self.settle(phase)

    def settle(self, phase: Reason | None = None) -> None:
        """The step or the edits have ended; or, in a hook after a step, once more: it has read the new weights."""
        with self._station.mesh.changed:
            self._phase = phase
            for unit in self._units:
                unit.settled = unit.version
        self._station.answer_waiting()

    # ---- the service thread
    def shard_numel(self, index: int) -> int:
        return self._units[index].layout.shard_numel

    def shard_for(self, index: int, stamp: Stamp) -> torch.Tensor | str:
        """The unit's shard as the reader needs it, else why it is not to be had (yet)."""
        unit = self._units[index]
        if stamp.clock < self.clock:
            return f"it has moved on to fence {self.clock} while the reader is still at fence {stamp.clock}"
        if stamp.clock > self.clock or self._phase is Reason.STEP:
            return f"it has not finished the step or edit that the reader has finished (fence {self.clock})"
        if not unit.fenced <= stamp.edits <= unit.edits:
            return f"it has made {unit.edits} edits of this unit where the reader has made {stamp.edits}"
        stray = unit.stray_edit()
        if stray is not None:
            return (
                f"it has written to the full tensor of parameter {stray} before the reader had read it, by a function "
                f"that does not wait for readers, as torch._foreach_mul_ or out=; edit weights by their methods (mul_, "
                f"copy_), by functions of model.parameters(), or under engine.full_params(write=True)"
            )
        if self._phase is Reason.FENCE or unit.edits > stamp.edits:
            return unit.shard_after(stamp.edits)
        if unit.version - unit.settled != stamp.stray:
            return "its weights were not edited in the same way as the reader's"
        return unit.shard
