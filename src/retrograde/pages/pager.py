"""Which pages are in memory. Decides speed and memory only: any page is paged in on demand.

The pager learns, for every pair of units used one after the other, which unit came next (forward and
backward apart; forecast.py). Following those successors gives the next page to prefetch and, with a resident budget,
the order in which pages will be needed again, so that the one needed last is evicted (Belady's rule).

[Note: who may stop a page from being dropped]
A page that the shard is part of (`Unit.stays`), the budget (`resident`), a page that is coming or expected
(`_make_space`), graphs that hold handles of frozen weights (`retire`), and whoever holds a full tensor or a view of
one, for whom `Unit.drop_unless_held` looks at the end. An edit that nobody reported is written back first, which is a
fence: ranks meet.

[Note: when a backward lets go of a page]
Rule 1: when the gradients of the unit's trained parameters have all arrived, unless graphs still hold handles of its
        frozen ones: a backward that passes through a frozen weight reads it after that, or without it.
Rule 2: else when another page needs the room, and at the latest when the backward ends. What was prefetched for it
        and not used goes then too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from retrograde.layout import Policy
from retrograde.pages.forecast import Forecast
from retrograde.pages.pool import BufferPool
from retrograde.pages.unit import Unit
from retrograde.torch_internals import NO_BACKWARD, current_backward, follow_backward, outside_transforms

HORIZON = 256  # how far ahead of now the forecast is followed when choosing what to evict


class _Backward(NamedTuple):
    """A backward that runs, and the units that it has used."""

    is_over: Callable[[], bool]
    used: set[Unit]


class _Masters(NamedTuple):
    """All masters of a unit, as they were when its leaves' counters were at `version`."""

    unit: Unit
    version: int
    flat: torch.Tensor


class Pager:
    """Decides which pages are in memory."""

    def __init__(
        self, policy: Policy, pool: BufferPool, entered: Callable[[], None], detours: Callable[[], int]
    ) -> None:
        """`entered` is called when code, not autograd, asks for a parameter: a backward that raised has ended then.
        `detours`: how often this rank has strayed from what all ranks do."""
        self._policy = policy
        self._pool = pool
        self._streams = pool.streams
        self._entered = entered
        self._detours = detours
        self._detours_before = 0  # the last step
        self._forecast = Forecast()
        self._current: Unit | None = None
        self._backward = NO_BACKWARD  # the one in which the current unit was opened
        self._backwards: dict[int, _Backward] = {}  # those that run
        self._guesses: set[Unit] = set()  # prefetched, and not used since
        self._resident: dict[Unit, None] = {}  # in the order of their coming
        self._passing_bytes = 0  # of resident units whose pages do not stay
        self._shown: dict[int, Unit] = {}  # storage of a page that is ready -> its unit
        self._held: set[Unit] = set()  # were to be dropped, and are here because somebody holds them, or they stay
        self._masters: _Masters | None = None  # the last that were read, until a page is, or a state dict has them all

    def full(self, unit: Unit, slot: int) -> torch.Tensor:
        """The full tensor of a parameter, paged in if need be. Runs at every access.
        A page belongs to no torch.func transform."""
        self._entered()
        with outside_transforms():
            self.open(unit)
            return unit.full(slot)

    def open(self, unit: Unit) -> None:
        """Make `unit` ready and valid, and start what is expected next."""
        if not self._streams.on_host:
            self._streams.refuse_capture("unit {}: its weights are used", unit.name)
        backward = current_backward()
        if unit is self._current and backward == self._backward and unit.page.ready and unit.valid:
            return
        self._make_ready(unit, backward)
        if unit is not self._current:
            self._forecast.use(unit, backward != NO_BACKWARD)
            self._current = unit
            self._prefetch(self._expected())

    def visit(self, unit: Unit, following: Unit | None) -> None:
        """Make `unit` ready and valid in a walk over all units, which knows what follows.
        It teaches the forecast nothing."""
        self._streams.refuse_capture("unit {}: its weights are read", unit.name)
        if unit is self._current and unit.page.ready and unit.valid:
            return
        self._forecast.break_off()
        self._make_ready(unit, current_backward())
        self._current = unit
        if self._policy.prefetch:
            self._prefetch(following)

    def _make_ready(self, unit: Unit, backward: int) -> None:
        self._masters = None
        self._note_use(unit, backward)  # may drop pages, so it comes before this one is used
        self._load(unit)
        self._finish_loading(unit)
        self._guesses.discard(unit)

    def masters(self, unit: Unit, slot: int) -> torch.Tensor:
        """A copy of all masters of a parameter.
        A state dict asks for one parameter after the other, so a unit is read once."""
        self._entered()
        self._streams.refuse_capture("unit {}: its masters are read", unit.name)
        with outside_transforms(), torch.no_grad():
            unit.write_back_edits()
            if self._masters is None or self._masters.unit is not unit or self._masters.version != unit.version:
                self._masters = None  # before others take their place in memory
                self._masters = _Masters(unit, unit.version, unit.whole_masters())
            place = unit.layout.slots[slot]
            return place.full(self._masters.flat[place.offset : place.end].clone())

    def forget_masters(self) -> None:
        """Let go of the masters: whoever asked for one parameter after the other has them all."""
        self._masters = None

    @property
    def current(self) -> Unit | None:
        """The unit that was used last."""
        return self._current

    def unit_of(self, storage: int) -> Unit | None:
        """The unit whose page this memory is, if it is a page's."""
        return self._shown.get(storage)

    def _prefetch(self, following: Unit | None) -> None:
        if following is not None and not following.valid:
            self._guesses.add(following)
            self._load(following)

    def _load(self, unit: Unit) -> None:
        if not unit.valid:
            unit.write_back_edits()
            self._make_space(unit)
            unit.load()
        elif unit in self._held:
            unit.take_part()  # whether ranks read a page does not depend on what one of them holds
        self._held.discard(unit)
        if unit not in self._resident:
            self._resident[unit] = None
            self._passing_bytes += _passing_bytes(unit)

    def _finish_loading(self, unit: Unit) -> None:
        storage = unit.page.storage
        if unit.page.loading and storage is not None:
            unit.finish_loading()
            self._shown[storage] = unit

    # ---- letting go
    def retire(self, unit: Unit) -> None:
        """Drop a unit's page, if it may go: a backward has all gradients of the unit's trained parameters."""
        if not unit.frozen_handles:
            self._drop_if_over(unit)

    def _note_use(self, unit: Unit, backward: int) -> None:
        """Remember which pages a backward has used, for its end. One that raised has ended without telling."""
        self._backward = backward
        for raised in [number for number, each in self._backwards.items() if number > backward or each.is_over()]:
            self._end_backward(raised)
        if backward == NO_BACKWARD or unit.stays:
            return
        if backward not in self._backwards:
            is_over = follow_backward(lambda: self._end_backward(backward))
            self._backwards[backward] = _Backward(is_over, set())
        self._backwards[backward].used.add(unit)

    def _end_backward(self, backward: int) -> None:
        if backward not in self._backwards:
            return  # it raised, and has been cleaned up after
        for unit in self._backwards.pop(backward).used:
            self._drop_if_over(unit)
        if self._backwards:
            return  # another is around it, which will go on
        self._forecast.break_off()
        guesses, self._guesses = self._guesses, set()
        for unit in guesses:  # about what this backward would need
            self._drop_if_over(unit)

    def _drop_if_over(self, unit: Unit) -> None:
        if not unit.stays and unit in self._resident and self._idle_bytes(set()) > self._policy.resident:
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        self._finish_loading(unit)
        storage = unit.page.storage
        if storage is None or not unit.drop_unless_held():
            self._held.add(unit)
            return
        del self._resident[unit]
        self._passing_bytes -= _passing_bytes(unit)
        del self._shown[storage]
        if self._current is unit:
            self._current = None

    # ---- around a step
    def finish_reads(self) -> None:
        """Wait for all reads that are under way."""
        for unit in list(self._resident):
            self._finish_loading(unit)

    def end_forecast(self) -> None:
        """Forget what the forecast has learned since the last step if this rank was on a detour. What it did there it
        will not do again, and if it prefetched what it expects from there it would stray once more."""
        before, self._detours_before = self._detours_before, self._detours()
        self._forecast.end_step(learned=before == self._detours_before)

    def quiesce(self) -> None:
        """Finish all reads and write back all edits, before the weights change."""
        self.finish_reads()
        for unit in list(self._resident):  # ranks may meet, and what others bring may run hooks that read weights
            unit.write_back_edits()
        self._forecast.break_off()

    def release(self) -> None:
        """Let go of every page that is not kept: of those that edits or a step have made stale, and of leftovers."""
        self._current = None
        self._masters = None
        for unit in list(self._resident):
            if not unit.valid:
                unit.note_change_of_shards()
            if not unit.valid or self._policy.resident == 0:
                self._drop(unit)
        self._pool.trim()

    def renew(self) -> None:
        """After a step, read held pages again:
        what somebody holds of them shows the new weights, as torch's parameters do."""
        self.release()
        for unit in [unit for unit in self._resident if not unit.valid and unit.page.held]:
            unit.write_back_edits()
            unit.load(alone=True)
            self._finish_loading(unit)
            self._held.add(unit)

    # ---- the budget
    def _expected(self) -> Unit | None:
        """The unit to prefetch."""
        return next(self._forecast.ahead(1), None) if self._policy.prefetch else None

    def _make_space(self, coming: Unit) -> None:
        """Evict until what is idle fits the budget.
        Not idle are the page coming, and the current one or the one expected."""
        expected = self._expected()
        spared = {coming}
        if self._policy.prefetch and self._current is not None:
            # Two pages: the one coming and either the one in use or, when that is being left, the next.
            spared.add(self._current if coming is expected or expected is None else expected)
        if self._idle_bytes(spared) <= self._policy.resident:
            return
        for unit in self._last_needed_first(spared):
            if self._idle_bytes(spared) > self._policy.resident:
                self._drop(unit)

    def _last_needed_first(self, spared: set[Unit]) -> list[Unit]:
        """The resident units that may go, the one needed last first; never needed again counts as last."""
        idle = [unit for unit in self._resident if unit not in spared and not unit.stays]
        if len(idle) < 2:
            return idle  # stage 3, as a rule: the forecast need not be followed
        when = {unit: index for index, unit in reversed(list(enumerate(self._forecast.ahead(HORIZON))))}
        return sorted(idle, key=lambda unit: when.get(unit, HORIZON), reverse=True)

    def _idle_bytes(self, spared: set[Unit]) -> int:
        return self._passing_bytes - sum(_passing_bytes(unit) for unit in spared if unit in self._resident)


def _passing_bytes(unit: Unit) -> int:
    """How many bytes of the unit's page go away again: none, if it stays."""
    return 0 if unit.stays else unit.layout.page_bytes
