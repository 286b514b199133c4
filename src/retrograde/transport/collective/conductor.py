"""Drives a rank's part in the order of collectives: carries out what the order asks for.

[Note: the conductor]
The order (transport/order) has no threads: its inputs are calls, its outputs effects. The program's thread comes with
wants and boundaries, the service thread with messages, a watch with alarms; all hold the lock of the connections, and
nobody waits for another rank while holding it but in `wait_for`, which lets go of it.

Rule 1: a call is issued by whoever learns that it is its turn: the program itself, or the service thread while the
        program waits for a verdict. What this rank brings to it lies in `_offered` then.
Rule 2: a period begins when the program next wants something or arrives somewhere: what ranks do in between, after a
        meeting, they do alike, and may call collectives that are no wants.
"""

import threading
import time
import weakref
from collections.abc import Sequence

from retrograde.transport.collective.communicator import CallWork, Communicator, Offer
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.order import (
    Abort,
    Alarm,
    Boundary,
    Effect,
    Issue,
    MeetingPlace,
    Participant,
    Role,
    Send,
    ServeOneSided,
    Settle,
    Want,
    decode,
    encode,
)

_WATCH = 0.1  # seconds between two looks at the alarms


class Conductor:
    """One rank's participant, and what its effects need: messages by the host's transport, calls by a communicator."""

    def __init__(self, participant: Participant, host: OneSidedTransport, communicator: Communicator) -> None:
        self._participant = participant
        self._host = host
        self._changed = host.connections.changed
        self._communicator = communicator
        self._offered: Offer | None = None
        self._served: list[CallWork] = []  # what the program waits for, when it has come
        self._settled: list[Settle] = []
        self._resting = False  # at a boundary that has been passed: the next period has not begun (Rule 2)
        self._standing: dict[Alarm, float] = {}  # since when
        host.listen(self._hear)
        watch = threading.Thread(target=_watch, args=(weakref.ref(self),), name="retrograde-order", daemon=True)
        watch.start()

    # ---- the program
    def want(self, want: Want, offer: Offer, what: str) -> CallWork:
        """Returns the call that serves it, which has been issued with `offer`."""
        with self._changed:
            self._begin_period()
            self._offered = offer
            self._served.clear()
            self._carry_out(self._participant.want(want))
        self._wait(self._served, what)
        self._offered = None
        return self._served.pop()

    def arrive(self, boundary: Boundary, name: str, what: str) -> Sequence[MeetingPlace]:
        """Returns when all ranks have arrived somewhere: the places to which they came."""
        with self._changed:
            self._begin_period()
            self._settled.clear()
            self._carry_out(self._participant.arrive(boundary, name))
        self._wait(self._settled, what)
        self._resting = True
        return self._settled[0].places

    def _begin_period(self) -> None:
        if self._resting:
            self._resting = False
            self._carry_out(self._participant.rest(again=False))

    def _wait(self, outcome: Sequence[object], what: str) -> None:
        others = list(self._host.connections.peers)
        self._host.wait_for(lambda: [] if outcome else others, what, for_main_threads=True)

    # ---- effects, with the lock held
    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._host.tell_order(effect.to, encode(effect.message))
                case Issue(role=Role.OWN):
                    assert self._offered is not None
                    self._served.append(self._communicator.start(self._offered))
                case Settle():
                    self._settled.append(effect)
                case Abort():
                    self._host.give_up(effect.cause)
                case Issue() | ServeOneSided():
                    self._stray(effect.call.want if isinstance(effect, Issue) else effect.want)
        self._host.connections.notify()

    def _stray(self, want: Want) -> None:
        """The order would go on without some rank. That is not built: all are told."""
        self._host.give_up(
            f"rank {self._host.rank}: ranks use units in different orders, or not the same ones: {want} is not what "
            f"all of them came to. Over collectives all ranks do the same between two steps; give "
            f'shard(transport="one-sided") where they do not'
        )

    # ---- the service thread
    def _hear(self, source: int, data: bytes) -> None:
        self._carry_out(self._participant.message(source, decode(data)))

    # ---- the watch
    def look_at_alarms(self) -> None:
        """Fire those that have stood for their time."""
        with self._changed:
            now = time.monotonic()
            self._standing = {alarm: self._standing.get(alarm, now) for alarm in self._participant.alarms()}
            for alarm, since in list(self._standing.items()):
                if now - since >= alarm.seconds:
                    del self._standing[alarm]
                    self._carry_out(self._participant.timeout(alarm))


def _watch(reference: "weakref.ref[Conductor]") -> None:
    while (conductor := reference()) is not None:
        conductor.look_at_alarms()
        del conductor
        time.sleep(_WATCH)
