"""When ranks meet, and what they conclude from it.

[Note: meetings]
Ranks come to a meeting for different reasons: one ends its third backward, another is already at the step. The
most urgent reason goes first; ranks that came for another take part as far as they are needed and meet again.
All ranks see the same positions, so all go through the same sequence, in the order of `Reason` and of this table.
Whatever the reasons are, gradients that any rank has sent before the meeting are added up at it (gradients/flow.py,
Rule 1).

| some rank is at (`Reason`)       | the others                                                        |
|----------------------------------|-------------------------------------------------------------------|
| the end of a backward (BACKWARD) | join its reductions; one that has no gradient adds nothing        |
| an edit (FENCE)                  | may edit from now on as well: all have read what they wanted      |
| a flush (FLUSH)                  | bring their own pending gradients                                 |
| a step (STEP)                    | all must be here                                                  |
| a value over ranks (VALUE)       | all must be here, for the same value                              |

Rule 1: reading `.grad` waits for nobody. Ranks meet before something is computed from gradients or written to `.grad`,
        if some have come: the backwards of a rank that did more come before it. (What waits in a window is flushed
        when `.grad` is read; that does wait.)
Rule 2: an edit and a flush are concluded at one meeting. Otherwise the rank that edits could go on to read a page whose
        owner has yet to make the same edit, while the owner waits for it at another meeting.
Rule 3: hooks may read weights. If a meeting for a step brings gradients to a unit that has hooks on any rank, it counts
        as a flush, and ranks meet for the step again: then all hooks have run, and weights may be written.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import torch

from retrograde.coordination.fences import MASTERS, WriteFence, WritePhase
from retrograde.coordination.meetings import Meetings
from retrograde.gradients import GradientFlow, runs_hooks
from retrograde.layout import Grid
from retrograde.pages import PageGathering, Pager, Unit
from retrograde.torch_internals import NO_BACKWARD, current_backward
from retrograde.transport import Position, Reason, Transport, Value, Work
from retrograde.transport.values import require_same

V = TypeVar("V", bound=Value)
_URGENCY = {reason: place for place, reason in enumerate(Reason)}


class Coordinator:
    """Decides when ranks meet, step, pass fences and recover. Implements `Coherence` for pages."""

    def __init__(
        self,
        transport: Transport,
        grid: Grid,
        meetings: Meetings,
        fence: WriteFence,
        flow: GradientFlow,
        pager: Pager,
        gathering: PageGathering | None = None,
    ) -> None:
        """`gathering`: how all ranks read a page together, where they can."""
        self._transport = transport
        self._gathering = gathering
        self._grid = grid
        self._meetings = meetings
        self._fence = fence
        self._flow = flow
        self._pager = pager
        self._steps = 0

    # ---- meetings
    def values(self, label: str, value: Callable[[], V]) -> list[V]:
        """Every rank's value, by rank. A rank computes its value anew if a flush changed gradients while it waited."""
        return [position.value for position in self.attend(Reason.VALUE, label, value)]  # type: ignore[misc]

    def shard_values(self, label: str, value: Callable[[], V]) -> list[V]:
        """The values of the ranks that hold this rank's model together, by shard, out of a meeting of all."""
        everybody = self.values(label, value)
        return [everybody[rank] for rank in self._grid.owners]

    def tensors(self, label: str, value: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the ranks that hold this rank's model together, by shard. They have one form on all ranks, and
        those of a device do not pass through the host."""
        mine: list[torch.Tensor] = []
        gathered: list[torch.Tensor] = []

        def form() -> Value:
            mine[:] = [value()]
            by_call = self._meetings.brings_by_call(mine[0])
            return [*mine[0].shape, str(mine[0].dtype)] if by_call else mine[0]

        def gather(positions: Sequence[Position]) -> None:
            if self._meetings.brings_by_call(mine[0]):
                _require_one_form(self._transport, label, [position.value for position in positions])
                gathered.extend(self._meetings.gather(mine[0]))

        positions = self.attend(Reason.VALUE, label, form, gather)
        return gathered or [cast(torch.Tensor, positions[rank].value) for rank in self._grid.owners]

    def attend(
        self,
        reason: Reason,
        label: str,
        value: Callable[[], Value] = lambda: None,
        then: Callable[[Sequence[Position]], None] = lambda positions: None,
    ) -> list[Position]:
        """Meet for `reason`, and before that for what others came for. Returns the positions of the last meeting.

        `then`: what all ranks do next, before any goes on."""
        flow = self._flow
        self._fence.refuse_capture("{} ({}): ranks meet", reason, label)

        def position() -> Position:
            return Position(reason, label, flow.sent_offers(), flow.pending_offers(), value())

        def anew() -> Position:
            flow.take_in_sums()
            return position()

        while True:
            self._pager.finish_reads()  # at this meeting another rank may get leave to write
            positions = self._meetings.meet(position(), anew)
            first = min([position.reason for position in positions], key=_URGENCY.__getitem__)
            if first in (Reason.STEP, Reason.VALUE):
                require_same(self._transport, positions)
            with flow.deliveries_completed():
                flow.sum_sent(positions)
                concluded = self._conclude(first, positions)
                if reason in concluded:
                    then(positions)
                if Reason.STEP not in concluded:
                    self._transport.meeting_is_over()
            if reason in concluded:
                if reason in (Reason.STEP, Reason.VALUE):
                    flow.note_same_place()
                return positions

    def _conclude(self, first: Reason, positions: list[Position]) -> set[Reason]:
        """Do what the most urgent reason asks of every rank, and return the reasons that this meeting has settled. What
        was sent in backwards has been added up before."""
        pending = {rank: position.pending for rank, position in enumerate(positions)}
        concluded = {first}
        match first:
            case Reason.FENCE:
                self._advance(WritePhase.EDITED)
                if any(position.reason is Reason.FLUSH for position in positions):
                    # At once: a rank that edits may next read what one that flushes has yet to edit (Rule 2).
                    self._flow.flush(pending)
                    concluded.add(Reason.FLUSH)
            case Reason.FLUSH:
                self._flow.flush(pending)
            case Reason.STEP:
                self._flow.flush(pending)
                if runs_hooks(positions):
                    return {Reason.FLUSH}  # Rule 3
                self._flow.pass_step()
                self._advance(WritePhase.STEPPED)
        return concluded

    # ---- gradients
    def flush_pending_gradients(self, why: str) -> None:
        """Reduce gradients that are still pending, so that `.grad` shows what torch would."""
        self._flow.recover()
        if current_backward() != NO_BACKWARD:
            return
        self._flow.send_pending()
        if self._flow.waits:
            self.attend(Reason.FLUSH, why)

    def end_window(self, why: str) -> None:
        """Reduce what waited in a window that ends; all ranks come by here. A rank that has nothing of it takes part
        now, or if what waits goes by calls, at its next meeting."""
        self._flow.recover()
        if self._flow.sends_pending:
            self.flush_pending_gradients(why)
        else:
            self.attend(Reason.FLUSH, why)

    def catch_up_on_gradients(self, why: str) -> None:
        """Meet before something is computed from gradients or written to `.grad`, if gradients have come: the backwards
        of ranks that did more come before it (Rule 1)."""
        self._flow.recover()
        if self._flow.fresh and current_backward() == NO_BACKWARD:
            self.attend(Reason.VALUE, why)

    def wait_for_gradients(self, why: str) -> None:
        """Wait for gradients that this rank is about to use and does not have: reduce what waits here, or if nothing
        does, let the others' backwards up to the same place come first."""
        self._flow.recover()
        if self._flow.waits:
            self.flush_pending_gradients(why)
        elif current_backward() == NO_BACKWARD:
            self.attend(Reason.FLUSH, why)

    def give_out_gradients(self, why: str) -> None:
        """Complete `.grad` before a piece of it is given out as a plain tensor."""
        if self._flow.comes_later:
            self.catch_up_on_gradients(why)

    # ---- weights
    def read(self, unit: Unit, page: torch.Tensor, alone: bool) -> Work:
        """Start reading the page as this rank sees it now."""
        self._come_to_rest()
        if self._gathering is not None and not alone and self._fence.is_at_rest(self._fence.stamp(unit)):
            work = self._gathering.gather(unit, page)
            if work is not None:
                return work
        unit.fetch_own(page)
        return self._read(unit.index, unit, page)

    def read_masters(self, unit: Unit, flat: torch.Tensor) -> Work:
        self._come_to_rest()
        return self._read(MASTERS + unit.index, unit, flat)

    def _come_to_rest(self) -> None:
        """End a step in whose hooks this rank reads, since reading ends it, and let waiting readers look again."""
        if self._fence.phase is WritePhase.STEPPED:
            self._fence.come_to_rest()
        self._transport.shards_changed()

    def _read(self, number: int, unit: Unit, flat: torch.Tensor) -> Work:
        missing = {owner.rank: flat[unit.layout.span(owner.shard)] for owner in self._grid.other_owners}
        return self._transport.read(number, unit.name, self._fence.stamp(unit), missing)

    def take_part(self, unit: Unit) -> None:
        if self._gathering is not None and self._fence.is_at_rest(self._fence.stamp(unit)):
            self._gathering.take_part(unit)

    @contextlib.contextmanager
    def writing(self, what: str, unit: Unit, slot: int) -> Iterator[None]:
        """Guard an edit inside of a parameter's piece in place; pass a fence before it, if one is needed."""
        self._fence.refuse_capture("{}: a sharded parameter is written to", what)
        if self._fence.must_be_passed(unit, slot):
            self.pass_fence(what)
        with self._fence.edit(unit, slot):
            yield
        self._transport.shards_changed()

    @contextlib.contextmanager
    def editing(self, what: str, unit: Unit, slot: int) -> Iterator[None]:
        """Guard an edit inside of a parameter's full tensor, and write it back to the shard."""
        if not unit.valid:
            self._pager.open(unit)  # a tensor that was held while others changed
        with self.writing(what, unit, slot):
            yield
            unit.write_back(slot)

    def expose(self) -> None:
        """Note that this rank's shards are about to be given out as plain tensors, whose edits nobody reports."""
        self._fence.expose()
        self._transport.shards_changed()

    def pass_fence(self, what: str) -> None:
        """Pass a fence before the weights are edited in place: there every rank has read all it wanted."""
        self._pager.quiesce()
        self.attend(Reason.FENCE, what)

    def _advance(self, phase: WritePhase) -> None:
        self._fence.advance(phase)
        self._transport.shards_changed()

    # ---- steps
    def begin_step(self) -> None:
        self._flow.recover()
        self._pager.quiesce()
        self._flow.send_pending()
        self._pager.end_forecast()
        self._steps += 1
        self.attend(Reason.STEP, f"step {self._steps}", self._flow.hooked_units)
        self._pager.release()

    def serve_during_step(self) -> None:
        """Serve other ranks during the step that began: it reads their weights and gradients while it writes
        (fences.py, Rule 2)."""
        self._fence.serve_during_step()
        self._transport.shards_changed()

    def end_step(self) -> None:
        self._fence.come_to_rest()
        self._transport.shards_changed()
        self._transport.meeting_is_over()
        self._pager.renew()


def _require_one_form(transport: Transport, label: str, forms: Sequence[Value]) -> None:
    """Fail unless the tensors that are about to be gathered have one shape and one dtype on all ranks."""
    if any(form != forms[0] for form in forms):
        found = "; ".join(f"rank {rank}: {form}" for rank, form in enumerate(forms))
        transport.fail(f"rank {transport.rank}: {label}: ranks have tensors of other shapes or dtypes ({found})")
