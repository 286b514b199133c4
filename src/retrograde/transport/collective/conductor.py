"""Drives a rank's part in the order of collectives: carries out what the order asks for.

[Note: the conductor]
The order (transport/order) has no threads: its inputs are calls, its outputs effects. The program's thread comes with
wants and boundaries, the service thread with messages, a watch with alarms and with calls that do not end; all hold
the lock of the connections, and nobody waits for another rank while holding it but in `wait_for`, which lets go of it.

Rule 1: a call is issued by whoever learns that it is its turn: the program itself, or the service thread while the
        program waits for a verdict. What this rank brings to it lies in `_offered` then. What is issued for the
        others' sake is in courtesy.py.
Rule 2: a period begins when what a meeting asks for is done, and after a step when shards are at rest: until then ranks
        do the same, and may call collectives that are no wants. Messages of the next period wait for that, so it is
        said as soon as it is so (`rest`); the program may next sit in a barrier of its own.
Rule 3: a call for which the program waits too long is said to be overdue. Others' service threads then issue it. On a
        device the program may wait for all that has been issued there (`synchronize`), and nobody is told. So the
        watch looks at the oldest call that is not done, one for the others' sake as well, from when the device has
        come to it; if it takes too long, all that was issued is said to be overdue. Not while the program waits for
        the others at a boundary.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from retrograde.transport.collective.communicator import POLL, CallWork, GatherOffer
from retrograde.transport.collective.courtesy import Courtesies, SparePage
from retrograde.transport.collective.replicas import AnyOffer, MeshCommunicator
from retrograde.transport.one_sided import UNTIL_HEARD, OneSidedTransport
from retrograde.transport.order import (
    Abort,
    Alarm,
    Boundary,
    CollectiveCall,
    Drop,
    Effect,
    Gather,
    Issue,
    NeedsAnswer,
    Participant,
    Passed,
    Role,
    Send,
    Serve,
    ServeOneSided,
    Settle,
    Sleep,
    Want,
    decode,
    encode,
)
from retrograde.transport.protocol import Work

_WATCH = 0.05  # seconds between two looks at alarms and calls


class CallPatience(NamedTuple):
    """How many seconds a call may take before it is overdue."""

    wanted: float
    courtesy: float  # on a device, for a call that was issued in advance for the others' sake


class _Broken(NamedTuple):
    """A call that could not be issued, or a watch that failed."""

    what: str
    error: Exception
    since: float


class Conductor:
    """Drives one rank's participant: its messages go by the host's transport, its calls by a communicator."""

    def __init__(
        self,
        participant: Participant,
        host: OneSidedTransport,
        communicator: MeshCommunicator,
        courtesies: Courtesies,
        patience: CallPatience,
    ) -> None:
        self._participant = participant
        self._host = host
        self._changed = host.connections.changed
        self._communicator = communicator
        self._courtesies = courtesies
        self._patience = patience
        self.passed = host.meetings  # meetings after which gradients are counted anew; the same on all ranks
        self._offered: AnyOffer | None = None
        self._wanted = ""  # what the offer is for, in words
        self._served: list[Work | None] = []  # the call that serves the program's want; None: one-sidedly
        self._settled: list[Settle] = []
        self._resting = False  # at a boundary that has been passed: the next period has not begun (Rule 2)
        self._arriving = False  # the program waits for the others at a boundary
        self._open: dict[int, CallWork] = {}  # calls of the program's that may not be done
        self._spares: dict[int, SparePage] = {}
        self._standing: dict[Alarm, float] = {}  # alarms, and since when they stand
        self._broken: _Broken | None = None
        host.listen(self._hear)
        watch = threading.Thread(target=_watch, args=(weakref.ref(self),), name="retrograde-order", daemon=True)
        watch.start()

    @property
    def detours(self) -> int:
        return self._participant.member.detours

    # ---- the program
    def want(self, want: Want, offer: AnyOffer, what: str) -> Work | None:
        """Say what the program wants. Returns the call that serves it, which has been issued with `offer`; None: it is
        to be served one-sidedly."""
        self._communicator.line.advance()
        with self._changed:
            self._begin_period()
            self._offered = offer
            self._wanted = what
            self._served.clear()
            self._settled.clear()
            self._carry_out(self._participant.want(want))
        self._wait(lambda: bool(self._served or self._settled or self._broken), what)
        self._fail_if_broken()
        if self._settled:  # all ranks have come together here: the order is one again
            self._settle(what)
            self.passed += 1
            self.rest()
            self._wait(lambda: bool(self._served or self._broken), what)
            self._fail_if_broken()
        self._offered = None
        return self._served.pop()

    def arrive(self, boundary: Boundary, name: str, what: str) -> Settle:
        """Wait until all ranks have arrived at some boundary."""
        with self._changed:
            self._begin_period()
            self._settled.clear()
            self._arriving = True
            self._carry_out(self._participant.arrive(boundary, name))
        self._wait(lambda: bool(self._settled or self._broken), what, for_main_threads=True)
        self._fail_if_broken()
        self._arriving = False
        return self._settle(what)

    def rest(self) -> None:
        """Begin the next period, if it has not begun:
        what the last meeting asked for is done, and shards are at rest."""
        with self._changed:
            self._begin_period()

    def _begin_period(self) -> None:
        if self._resting:
            self._resting = False
            self._carry_out(self._participant.rest())

    def _settle(self, what: str) -> Settle:
        """End a period whose calls all ranks have issued, when those for the others' sake are done."""
        line = self._communicator.line
        while not self._courtesies.done:
            self._wait(lambda: self._courtesies.done or line.is_due, what, look_again=POLL)
            line.advance()
        with self._changed:
            error = self._courtesies.end_period()
        if error is not None:
            self._host.fail_of_backend("a call for the others' sake", error)
        self._resting = True
        return self._settled.pop()

    def _wait(
        self, over: Callable[[], bool], what: str, for_main_threads: bool = False, look_again: float | None = None
    ) -> None:
        others = list(self._host.connections.peers)
        self._host.wait_for(lambda: [] if over() else others, what, for_main_threads, look_again)

    # ---- effects, with the lock held
    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    needs_answer = isinstance(effect.message, NeedsAnswer)
                    self._host.tell_order(effect.to, encode(effect.message), needs_answer)
                case Issue():
                    self._issue(effect.call, effect.role)
                case Serve() if self._broken is None:
                    self._served.append(self._work_of(effect.call))
                case ServeOneSided():
                    self._served.append(None)
                case Settle():
                    self._settled.append(effect)
                case Drop():
                    self._spares.pop(effect.call.number, None)
                case Abort():
                    self._host.give_up(effect.cause)
                case Serve() | Sleep() | Passed():
                    pass
        self._host.connections.notify()

    def _issue(self, call: CollectiveCall, role: Role) -> None:
        """Issue a call. An error is kept for the program's thread. Once a rank has failed, which is the cause then,
        nothing is issued for the others' sake any more."""
        if self._broken is not None or (role is not Role.OWN and self._host.failure is not None):
            return
        try:
            if role is Role.OWN:
                self._start_own(call)
            else:
                self._attend(call, role)
        except Exception as error:
            doing = "called" if role is Role.OWN else "was to take part, for the others, in"
            self._break(f"rank {self._host.rank} {doing} {call.want}", error)

    def _break(self, what: str, error: Exception) -> None:
        """What went wrong first is kept for the program's thread."""
        with self._changed:
            if self._broken is None:
                self._broken = _Broken(what, error, time.monotonic())
                self._host.connections.notify()

    def _start_own(self, call: CollectiveCall) -> None:
        assert self._offered is not None
        work = self._communicator.start(self._offered)
        work.what = self._wanted
        work.patience = self._patience.wanted
        self._open[call.number] = work

    def _attend(self, call: CollectiveCall, role: Role) -> None:
        if role is Role.SPARE and isinstance(call.want, Gather):
            work, page = self._courtesies.fetch(call.want)
            self._spares[call.number] = SparePage(work, page)
        else:
            work = self._courtesies.attend(call.want, self.passed)
        if work.in_order:
            work.patience = self._patience.wanted if role is Role.SPARE else self._patience.courtesy
            self._open[call.number] = work

    def _fail_if_broken(self) -> None:
        if self._broken is not None:
            self._host.fail_of_backend(self._broken.what, self._broken.error)

    def _tell_if_broken(self, now: float) -> None:
        """Tell all ranks that a call could not be issued, if no other cause has been heard by now: the program may be
        elsewhere, and others wait."""
        broken = self._broken
        if broken is not None and self._host.failure is None and now - broken.since > UNTIL_HEARD:
            self._host.give_up(f"{broken.what}: {broken.error}")

    def _work_of(self, call: CollectiveCall) -> Work:
        spare = self._spares.pop(call.number, None)
        if spare is None:
            return self._open[call.number]
        assert isinstance(self._offered, GatherOffer)
        work = self._open[call.number] = spare.work
        work.what = self._wanted
        work.patience = self._patience.wanted
        return SparePage(spare.work, spare.page, self._offered)

    # ---- the service thread
    def _hear(self, source: int, data: bytes) -> None:
        self._carry_out(self._participant.message(source, decode(data)))

    # ---- the watch
    def look(self) -> None:
        """The watch's thread has nobody to raise to: its errors are told as those of a call are."""
        try:
            self._look_around()
        except Exception as error:
            self._break(f"rank {self._host.rank}'s watch over calls ({type(error).__name__})", error)

    def _look_around(self) -> None:
        """Issue what is due, fire alarms that have stood their time, and look for calls that are done or overdue.

        What is broken comes first: the rest may raise each time."""
        with self._changed:
            self._tell_if_broken(time.monotonic())
        self._communicator.line.advance()
        with self._changed:
            now = time.monotonic()
            self._look_at_alarms(now)
            self._courtesies.collect()
            self._look_at_calls(now)

    def _look_at_calls(self, now: float) -> None:
        for number, work in list(self._open.items()):
            if work.is_young(now):
                return
            if work.done():
                del self._open[number]
                self._participant.completed(number)
                continue
            if not self._arriving and work.is_overdue(now):
                late = max(self._open) if work.in_order else number
                self._carry_out(self._participant.overdue(late))
            if work.in_order:
                return  # those behind it wait for it

    def _look_at_alarms(self, now: float) -> None:
        self._standing = {alarm: self._standing.get(alarm, now) for alarm in self._participant.alarms()}
        for alarm, since in list(self._standing.items()):
            if now - since >= alarm.seconds:
                del self._standing[alarm]
                self._carry_out(self._participant.timeout(alarm))


def _watch(reference: "weakref.ref[Conductor]") -> None:
    while (conductor := reference()) is not None:
        conductor.look()
        del conductor
        time.sleep(_WATCH)
