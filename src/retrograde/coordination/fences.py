"""Coherence: which state of the shards a reader may see, and when a writer may write.

[Note: fences]
Pages are read from other ranks without their main thread taking part, so something must stop a rank from
changing a shard that another still has to read, and from reading one that its owner has yet to change.
Between two *fences* shards are only read; writing needs a fence, a meeting at which every rank says that it
has read all it wanted. An optimizer step is a fence; so is the first in-place edit of a weight after a step
(`clamp_`, EMA, manual SGD), which the tensors users hold report before it happens (parameters/handlers.py,
pages/full_tensor.py). The clock counts fences and is the same on all ranks.

Rule 1: a request names the clock. An owner that is behind answers when it has caught up; one that is ahead
        refuses: the reader missed a fence.
Rule 2: during a step nothing is served. Edits are counted, unit by unit, and a reader names how many it has made:
        an owner that has made fewer answers when it has caught up, one that has made more undoes them in a copy.
        So ranks may edit at their own pace, and read in between or not. A step that is not element by element (Muon,
        LBFGS) reads in between, so it is a row of edits, served like others; but a reader that has ended its step waits
        for an owner that has not, whatever this one writes without telling.
Rule 3: the first edit after a step needs a fence; so does editing a parameter a second time, which bounds what is kept
        for undoing by one shard. Only edits count, which all ranks make alike: what a rank has read is its own affair,
        and a rank that counted it would wait at a fence for others that have no reason to come. So from the first
        edit to the next step owners send copies.
Rule 4: an edit nobody reported (through an alias of a leaf) still moves the leaf's version counter: readers
        and owners compare how many such stray edits they saw. (Not between an edit and the next step, where owners
        send copies: reported and stray edits cannot be told apart there.)
Rule 5: an edit of a full tensor that nobody reported (`torch._foreach_mul_`, `out=`) moves the full tensor's counter.
        It becomes a reported one when its rank next looks (pages/unit.py). Until then, where pages stay, the shard is
        not served: its old values are gone, and who still needs them is told so.
"""

import contextlib
import threading
from collections.abc import Iterator
from enum import Enum, auto

import torch

from retrograde.devices import HAPPENED, Event, Streams
from retrograde.pages import Unit
from retrograde.torch_internals import version_of
from retrograde.transport import Rest, Stamp

MASTERS = 2**20  # unit 3's masters are read under the number MASTERS + 3: to a transport they are one more unit


class WritePhase(Enum):
    """What may happen to the shards of this rank."""

    READ = auto()  # they are at rest
    EDITED = auto()  # a fence was passed for the sake of edits
    STEPPED = auto()  # an optimizer is at work that reads nothing of other ranks


class WriteFence:
    """The state of this rank's shards. Implements `ShardServer`: other threads ask for shards at any time."""

    def __init__(self, streams: Streams) -> None:
        self.clock = 0
        self.phase = WritePhase.READ
        self._units: list[Unit] = []
        self._began = 0  # the clock when the last step began
        self._stepped = 0  # the clock when the last step that has ended began
        self._exposed = False  # has the user pieces of the shards as plain tensors, to write to at any time?
        self._streams = streams
        self._written: Event = HAPPENED  # after the last write that this rank knows of
        self._lock = threading.RLock()

    def add(self, unit: Unit) -> None:
        """Take in a unit, for whose shard other ranks may ask from now on."""
        with self._lock:
            self._units.append(unit)
            self._make_sources()
            self._written = self._streams.current().record()

    # ---- the main thread
    def refuse_capture(self, what: str, *names: str) -> None:
        self._streams.refuse_capture(what, *names)

    def stamp(self, unit: Unit) -> Stamp:
        """The state of the other ranks' shards that goes with this rank's own."""
        return Stamp(self.clock, unit.edits.made, unit.version - unit.version_at_rest, self._stepped)

    def is_at_rest(self, stamp: Stamp) -> bool:
        """Is the state that this rank sees, as its stamp names it, that in which the last step left the shards?"""
        return self.phase is WritePhase.READ and not stamp.edits and not stamp.stray

    def must_be_passed(self, unit: Unit, slot: int) -> bool:
        """Must a fence be passed before this parameter is edited?"""
        return self.phase is WritePhase.READ or unit.edits.has(slot)

    @contextlib.contextmanager
    def edit(self, unit: Unit, slot: int) -> Iterator[None]:
        """Note an edit of a parameter in place, which is made inside."""
        piece = unit.pieces[slot]
        with self._lock:
            if self.phase is WritePhase.EDITED:
                current = self._streams.current()
                unit.edits.begin(slot, piece)
                self._written = current.record()  # after the copy that can undo the edit
                current.wait(self._streams.serving.record())  # other ranks' reads of the piece come first
        self._streams.crossing.wait_for_copies()  # those of the piece to the device must be done
        version = version_of(piece)
        try:
            yield
        except BaseException:
            with self._lock:
                unit.edits.undo_begin()
            raise
        with self._lock:
            self._written = self._streams.current().record()
            unit.edits.end()
            unit.version_at_rest += version_of(piece) - version  # the edit was reported: it is not stray
            unit.outdate((slot,))

    def advance(self, phase: WritePhase) -> None:
        """Pass a fence together with all ranks: they may write from now on, whatever each came for."""
        self._streams.crossing.wait_for_copies()
        with self._lock:
            self.clock += 1
            if phase is WritePhase.STEPPED:
                self._began = self.clock
            for unit in self._units:
                if phase is WritePhase.STEPPED:
                    unit.edits.pass_step()
                else:
                    unit.edits.pass_fence()
            self._enter(phase)

    def expose(self) -> None:
        """Note that a piece is given out as a plain tensor: from now on readers have to ask (Rule 4)."""
        self._exposed = True
        self._streams.crossing.wait_at_once()

    def serve_during_step(self) -> None:
        """Serve other ranks during this step:
        it is a row of edits with reads among them, and has passed the fence they need."""
        with self._lock:
            self._enter(WritePhase.EDITED)

    def come_to_rest(self) -> None:
        """End a step, so that the shards are at rest. A hook after the step that reads the new weights ends it, too."""
        with self._lock:
            self._stepped = self._began
            self._make_sources()
            self._enter(WritePhase.READ)

    def _make_sources(self) -> None:
        """Make every unit's source, which other ranks read where it lies (pages/source.py, Rule 1)."""
        for unit in self._units:
            _ = unit.source

    def _enter(self, phase: WritePhase) -> None:
        self.phase = phase
        self._written = self._streams.current().record()
        if phase is WritePhase.STEPPED:
            return  # nobody is served until it comes to rest
        for unit in self._units:
            unit.version_at_rest = unit.version

    # ---- any thread
    def state(self) -> tuple[int, Rest]:
        with self._lock:
            if self.phase is WritePhase.STEPPED:
                return self.clock, Rest.STEPPING
            edited = self.phase is WritePhase.EDITED or any(unit.edits.made for unit in self._units)
            return self.clock, Rest.ASK if edited or self._exposed else Rest.AT_REST

    def shard_numel(self, number: int) -> int:
        return self._units[number % MASTERS].shard.numel()

    def shard_to_gather(self, number: int) -> torch.Tensor:
        """A unit's source as the last step left it, for a gather. Between an edit and the next step no rank gathers."""
        unit = self._units[number]
        serving = self._streams.serving
        with self._lock:
            serving.wait(self._written)
            edited = unit.edits.made or unit.version != unit.version_at_rest or not unit.source_is_current
            if self.phase is WritePhase.READ and edited:
                raise RuntimeError(
                    f"it has edited unit {unit.name} since the last step, and the others read it as it was before; let "
                    f"all ranks make the same edits between the same reads"
                )
            if unit.source_is_current:
                return unit.source
            made = serving.empty(unit.shard.numel(), unit.layout.dtype)
            serving.run(lambda: made.copy_(unit.shard))
            return made

    def shard_for(self, number: int, stamp: Stamp) -> torch.Tensor | str:
        """A unit's source, or its masters, in the state that the reader needs;
        else a text that says why it is not to be had (yet)."""
        of_masters, index = divmod(number, MASTERS)
        serving = self._streams.serving
        with self._lock:
            serving.wait(self._written)
            wanted = self._units[index]
            dtype = wanted.shard.dtype if of_masters else wanted.layout.dtype
            why_not = self._why_not(wanted, stamp)
            if why_not is not None:
                return why_not
            if self.phase is WritePhase.EDITED or wanted.edits.made > stamp.edits:
                return wanted.shard_after(stamp.edits, dtype, serving)
            if wanted.version - wanted.version_at_rest != stamp.stray:
                return "its weights were not edited in the same way as the reader's"
            if of_masters:
                return wanted.shard
            return wanted.source if wanted.source_is_current else wanted.shard_after(stamp.edits, dtype, serving)

    def _why_not(self, unit: Unit, stamp: Stamp) -> str | None:
        if stamp.clock < self.clock:
            return f"it has moved on to fence {self.clock} while the reader is still at fence {stamp.clock}"
        if stamp.clock > self.clock or stamp.stepped > self._stepped or self.phase is WritePhase.STEPPED:
            return f"it has not finished the step or edit that the reader has finished (fence {self.clock})"
        if not unit.edits.fenced <= stamp.edits <= unit.edits.made:
            return f"it has made {unit.edits.made} edits of this unit where the reader has made {stamp.edits}"
        stray = unit.stray_edit()
        if stray is None:
            return None
        return (
            f"it has written to the full tensor of parameter {stray} before the reader had read it, by a function "
            f"that does not wait for readers, as torch._foreach_mul_ or out=; edit weights by their methods (mul_, "
            f"copy_), by functions of model.parameters(), or under engine.full_params(write=True)"
        )
