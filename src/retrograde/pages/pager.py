"""Which pages are in memory. Decides speed and memory only: any page is paged in on demand.

The pager learns, for every pair of units used one after the other, which unit came next (forward and
backward apart). Following those successors gives the next page to prefetch and, with a resident budget,
the order in which pages will be needed again, so that the one needed last is evicted (Belady's rule).

[Note: when a backward lets go of a page]
Rule 1: when the gradients of the unit's trained parameters have all arrived, unless graphs still hold handles of its
        frozen ones: a backward that passes through a frozen weight reads it after that, or without it.
Rule 2: else when another page needs the room, and at the latest when the backward ends. What was prefetched for it
        and not used goes then too.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from retrograde.layout import Policy
from retrograde.pages.pool import BufferPool
from retrograde.pages.unit import Unit

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_NO_TRANSFORM = contextlib.nullcontext()
HORIZON = 256  # how far ahead of now the forecast is followed when choosing what to evict


class Place(NamedTuple):
    before: Unit | None
    unit: Unit | None
    backward: bool


NOWHERE = Place(None, None, False)


class Forecast:
    """What is used after what. A first-order model of pairs: learns in one pass, forgets in one."""

    def __init__(self) -> None:
        self._next: dict[Place, tuple[Unit, bool]] = {}
        self.at = NOWHERE

    def use(self, unit: Unit, backward: bool) -> None:
        if self.at is not NOWHERE:
            self._next[self.at] = unit, backward
        self.at = Place(self.at.unit, unit, backward)

    def ahead(self, limit: int) -> Iterator[Unit]:
        """Units expected next. Stops at the end of a backward: a step may come before the next forward."""
        at = self.at
        for _ in range(limit):
            following, backward = self._next.get(at, (None, False))
            if following is None or (at.backward and not backward):
                return
            yield following
            at = Place(at.unit, following, backward)


class Pager:
    def __init__(self, policy: Policy, pool: BufferPool) -> None:
        self._policy, self._pool = policy, pool
        self._forecast = Forecast()
        self._current: Unit | None = None
        self._task = -1  # the backward in which the current unit was opened
        self._used: dict[int, set[Unit]] = {}  # by the backwards that run
        self._guesses: set[Unit] = set()  # prefetched, and not used since
        self._resident: dict[Unit, None] = {}  # in the order of their coming
        self.live: dict[int, Unit] = {}  # storage of a page that is ready -> its unit (saved.py looks here)

    def access(self, unit: Unit, slot: int) -> torch.Tensor:
        """The full tensor of a parameter, paged in if need be. Hot. A page belongs to no torch.func transform."""
        with _NO_TRANSFORM if peek_interpreter_stack() is None else temporarily_clear_interpreter_stack():
            self.open(unit)
            return unit.full(slot)

    def open(self, unit: Unit) -> None:
        """Make `unit` ready and valid, and start what is expected next."""
        task = _graph_task()
        if unit is self._current and task == self._task and unit.ready and unit.valid:
            return
        self._note_use(unit, task)  # may drop pages, so it comes before this one is used
        self._start(unit)
        self._finish(unit)
        self._guesses.discard(unit)
        if unit is not self._current:
            self._forecast.use(unit, task != -1)
            self._current = unit
            if (following := self._expected()) is not None and not following.valid:
                self._guesses.add(following)
                self._start(following)

    def _start(self, unit: Unit) -> None:
        if not unit.valid:
            unit.write_back_if_edited()
            self._make_room(unit)
            unit.start()
        self._resident.setdefault(unit)

    def _finish(self, unit: Unit) -> None:
        if unit.reading is not None:
            unit.finish()
            self.live[unit.page.untyped_storage()._cdata] = unit

    def retire(self, unit: Unit) -> None:
        """A backward has all gradients of this unit's trained parameters."""
        if not unit.frozen_handles:
            self._drop_if_over(unit)

    def _note_use(self, unit: Unit, task: int) -> None:
        """Remember which pages a backward has used, for its end. One that raised has ended without telling."""
        self._task = task
        for raised in [number for number in self._used if number > task]:
            self._end_backward(raised)
        if task != -1 and not unit.at_home:
            if task not in self._used:
                self._used[task] = set()
                _queue_callback(lambda: self._end_backward(task))
            self._used[task].add(unit)

    def _end_backward(self, task: int) -> None:
        for unit in self._used.pop(task, ()):
            self._drop_if_over(unit)
        if not self._used:  # no other around it, which would go on
            self._forecast.at = NOWHERE
            for unit in self._guesses:  # about what this backward would need
                self._drop_if_over(unit)
            self._guesses.clear()

    def _drop_if_over(self, unit: Unit) -> None:
        if unit in self._resident and self._idle_bytes(set()) > self._policy.resident:
            self._drop(unit)

    def quiesce(self) -> None:
        """Before the weights change: no read may be under way."""
        for unit in self._resident:
            self._finish(unit)
            unit.write_back_if_edited()
        self._forecast.at = NOWHERE  # what comes after is not what follows

    def release(self) -> None:
        """Let go of every page that is not kept: after a step they are stale, after a failure they are leftovers."""
        self._current = None
        for unit in list(self._resident):
            if unit.ready and not unit.valid:
                unit.outdate()
            if not unit.valid or self._policy.resident == 0:
                self._drop(unit)
        self._pool.trim()

    def renew(self) -> None:
        """After a step: what somebody holds of a page shows the new weights, as torch's parameters do."""
        self.release()
        for unit in [unit for unit in self._resident if not unit.valid and unit.held]:
            self._start(unit)
            self._finish(unit)

    def _expected(self) -> Unit | None:
        """The unit to prefetch."""
        return next(self._forecast.ahead(1), None) if self._policy.prefetch else None

    def _make_room(self, coming: Unit) -> None:
        """Evict until what is idle fits the budget. In use: the page coming, the current one, one expected."""
        expected = self._expected()
        spared = {coming}
        if self._policy.prefetch and self._current is not None:
            # Two pages: the one coming and either the one in use or, when that is being left, the next.
            spared.add(self._current if coming is expected or expected is None else expected)
        for unit in self._by_next_use() if self._idle_bytes(spared) > self._policy.resident else ():
            if unit not in spared and self._idle_bytes(spared) > self._policy.resident:
                self._drop(unit)

    def _by_next_use(self) -> list[Unit]:
        """Resident units, the one needed last first; never needed again counts as last."""
        when = {unit: index for index, unit in reversed(list(enumerate(self._forecast.ahead(HORIZON))))}
        return sorted(self._resident, key=lambda unit: when.get(unit, HORIZON), reverse=True)

    def _idle_bytes(self, spared: set[Unit]) -> int:
        return sum(unit.layout.page_bytes for unit in self._resident if unit not in spared and not unit.at_home)

    def _drop(self, unit: Unit) -> None:
        self._finish(unit)
        storage = -1 if unit.buffer is None else unit.buffer.untyped_storage()._cdata
        if unit.drop():
            del self._resident[unit], self.live[storage]
            self._current = None if self._current is unit else self._current
