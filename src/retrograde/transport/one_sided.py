"""One engine's end of the mesh: read a shard, put a gradient, meet the others.

A *meeting* is the only point at which ranks wait for each other's main thread. Every rank brings its
position (why it came and what it has to offer) and leaves with everybody's, so all ranks see the same
sequence of meetings and can draw the same conclusions from it. That replaces an agreed order of
collectives: positions need not be equal, they only have to be reconcilable (gradients/council.py).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

from retrograde.errors import DivergenceError
from retrograde.transport.connections import Connections
from retrograde.transport.messages import (
    Ask,
    Fail,
    Key,
    Meet,
    MessageError,
    Offers,
    Page,
    Put,
    Read,
    Reason,
    Stamp,
    Tell,
    ToReceiver,
    Value,
    pack,
    tensor_forms,
    unpack,
)


class Position(NamedTuple):
    """What a rank brings to a meeting: why it came, and what it has for the others.

    `launched`: gradients that it has put since its last meeting. This one adds them up, whatever the others came for.
    `pending`: gradients that it would put if this meeting turns out to flush them.
    """

    kind: Reason
    label: str
    launched: Offers
    pending: Offers
    value: Value = None


Reading = Callable[[], None]  # a page-in under way: returns when every part has arrived
Sending = tuple[int, int]  # to whom, and up to where (mesh.py)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Station:
    mesh: Connections
    timeout: float
    # Asked by the service thread: a unit's shard in the state that a reader needs, else why it is not to be had (yet).
    serve: Callable[[int, Stamp], torch.Tensor | str] = field(init=False)
    # Asked by the service thread: how many elements a unit's shard has on this rank.
    elements: Callable[[int], int] = field(init=False)
    number: int = -1
    failure: str | None = None
    _told: dict[int, str] = field(default_factory=dict)  # where others say they are, when something is amiss
    where: str = "not started"
    meetings: int = 0
    _met: dict[int, dict[int, Position]] = field(default_factory=dict)
    _requests: list[tuple[int, int, Stamp]] = field(default_factory=list)  # reader, unit, state
    _reading: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # unit, owner: where its shard belongs
    _lost: tuple[str, Exception] | None = None  # what went wrong with a rank
    _said: bool = False  # has the main thread been told, by an exception, that something is wrong?
    _arrivals: dict[tuple[Key, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh.attach(self)

    # ---- reading pages
    def read(self, unit: int, name: str, stamp: Stamp, into: Callable[[int], torch.Tensor]) -> Reading:
        """Start reading every peer's shard of `unit` into `into(rank)`. What it returns waits for them."""
        self.check()
        for src in self.mesh.peers:
            self._reading[unit, src] = into(src)
            self._send(src, Read(self.number, unit, stamp))
        what = f"reading unit {name}"
        return lambda: self._wait_for(lambda: [src for src in self.mesh.peers if (unit, src) in self._reading], what)

    def answer_waiting(self) -> None:
        """The main thread changed something a reader may be waiting for."""
        if self._requests:
            with self.mesh.changed:
                self._requests = [request for request in self._requests if not self._answer(*request)]

    def _answer(self, src: int, unit: int, stamp: Stamp) -> bool:
        found = self.serve(unit, stamp)
        if isinstance(found, str):
            return False
        self.mesh.tell(src, Page(self.number, unit), data=[found])
        return True

    # ---- putting gradients
    def put(self, key: Key, dst: int, parts: list[torch.Tensor]) -> Sending:
        """Start sending `parts` to `dst`, which takes them as one. They must not change before `finish`."""
        return dst, self._send(dst, Put(self.number, key, parts[0].dtype), data=parts)

    def finish(self, sending: list[Sending]) -> None:
        self._wait_for(lambda: [dst for dst, at in sending if not self.mesh.sent(dst, at)], "taking part of a gradient")

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        """What `src` put under `key`; it said so at a meeting, so it is there or on its way."""
        self._wait_for(lambda: [] if self.arrived(key, src) else [src], f"its gradient of unit {unit}")
        with self.mesh.changed:
            return self._arrivals.pop((key, src))

    def arrived(self, key: Key, src: int) -> bool:
        return (key, src) in self._arrivals

    def discard_arrivals(self) -> None:
        """At a step: what was put before this meeting and nobody took belongs to backwards that were given up."""
        with self.mesh.changed:
            self._arrivals = {at: part for at, part in self._arrivals.items() if at[0].meeting >= self.meetings}

    # ---- meeting
    def meet(self, position: Position) -> list[Position]:
        """Wait for every rank to come to its next meeting; returns everybody's position by rank."""
        self.meetings = number = self.meetings + 1
        what = f"{position.kind} ({position.label})"
        self.where = f"waiting for the other ranks at {what}"
        value, tensors = pack(position.value)
        launched, pending = position.launched, position.pending
        message = Meet(self.number, number, position.kind, position.label, launched, pending, value)
        for peer in self.mesh.peers:
            self._send(peer, message, data=tensors)
        absent = lambda: [p for p in self.mesh.peers if p not in self._met.get(number, {})]  # noqa: E731
        self._wait_for(absent, what, for_main_threads=True)
        self.where = f"outside retrograde, after {what}"
        met = self._met.pop(number, {}) | {self.mesh.rank: position}
        return [met[rank] for rank in range(self.mesh.world)]

    def _send(self, dst: int, message: ToReceiver, data: Sequence[torch.Tensor] = ()) -> int:
        try:
            return self.mesh.send(dst, message, data=data)
        except OSError as error:
            cause = self.mesh.why_lost(dst)
            self.check()
            self._said = True
            raise DivergenceError(f"rank {self.mesh.rank}: {cause}") from error

    def check(self) -> None:
        if self.failure is not None:
            self._said = True
            raise DivergenceError(self.failure)

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Give up on every rank: tell the others, then raise."""
        self._announce(text)
        self._said = True
        raise DivergenceError(self.failure) from cause

    def _announce(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            for peer in self.mesh.peers:
                self.mesh.tell(peer, Fail(self.number, failure))

    @contextlib.contextmanager
    def shared_fate(self, what: str) -> Iterator[None]:
        """What goes wrong inside on one rank is told to the others, which would wait for it in vain."""
        try:
            yield
        except Exception as error:
            self._said = True
            if not isinstance(error, DivergenceError):
                self._announce(f"rank {self.mesh.rank}: {what} raised {type(error).__name__}: {error}")
            raise

    def _wait_for(self, missing: Callable[[], list[int]], what: str, for_main_threads: bool = False) -> None:
        """Until no rank is missing. A rank that has said goodbye still serves; its main thread does nothing more."""

        def finished() -> list[int]:
            return [peer for peer in missing() if peer in self.mesh.departed] if for_main_threads else []

        with self.mesh.changed:
            self.mesh.changed.wait_for(lambda: not missing() or self.failure or self._lost or finished(), self.timeout)
            self.check()
            if not (absent := missing()):
                return  # also where a rank has left since: it had nothing more to bring
            if gone := finished():
                self.fail(
                    f"rank {self.mesh.rank} is at {what} and needs rank(s) {', '.join(map(str, gone))}, which "
                    f"finished: their programs have ended, or called dist.destroy_process_group(). Let every rank "
                    f"come to the same steps, also one that has no more data: it may step without a backward"
                )
            if self._lost is not None:
                self._said = True
                raise DivergenceError(f"rank {self.mesh.rank}: {self._lost[0]}") from self._lost[1]
            for peer in absent:
                self.mesh.tell(peer, Ask(self.number))
            self.mesh.changed.wait_for(lambda: all(p in self._told for p in absent), 1.0)
        places = "; ".join(f"rank {p} is {self._told.get(p, 'not answering')}" for p in absent)
        self.fail(
            f"rank {self.mesh.rank} waited {self.timeout:g} s for rank(s) {', '.join(map(str, absent))} "
            f"at {what}, but {places}. Let every rank come to the same steps (they may skip units, "
            f"reorder them or do fewer backwards), or raise shard(timeout=...)"
        )

    # ---- the service thread's side, which holds `mesh.changed`
    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        match message:
            case Read():
                if not self._answer(src, message.unit, message.stamp):
                    self._requests.append((src, message.unit, message.stamp))
                return  # the main thread does not wait for that
            case Page():
                self._reading.pop((message.unit, src), None)
            case Put():
                self._arrivals[message.key, src] = data[0]
            case Meet():
                value = unpack(message.value, data)
                position = Position(message.kind, message.label, message.launched, message.pending, value)
                self._met.setdefault(message.number, {})[src] = position
            case Ask():
                self._tell(src)
            case Tell():
                self._told[src] = message.where
            case Fail():
                self.failure = self.failure or message.text
            case _:
                raise MessageError(f"a {type(message).__name__} was sent to an engine")
        self.mesh.changed.notify_all()

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)

    def unsaid(self) -> str | None:
        if self._said:
            return None
        if self.failure is not None:
            return self.failure
        return None if self._lost is None else self._lost[0]

    def _tell(self, src: int) -> None:
        answers = [self.serve(unit, stamp) for reader, unit, stamp in self._requests if reader == src]
        reasons = {answer for answer in answers if isinstance(answer, str)}
        self.mesh.tell(src, Tell(self.number, "; ".join([self.where, *reasons])))

    # ---- the service thread's side, which does not hold it
    def room(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong; None: nobody wants them any more."""
        match message:
            case Page():
                waiting = self._reading.get((message.unit, src))
                return None if waiting is None else [waiting]
            case Put():
                return [torch.empty(self.elements(message.key.unit), dtype=message.dtype)]
            case Meet():
                forms = tensor_forms(message.value)
                expected = sum(form.nbytes for form in forms)
                if expected != nbytes:  # before memory is taken
                    raise MessageError(f"{nbytes} bytes of tensors with a meeting's value that has {expected}")
                return [form.empty() for form in forms]
            case _:
                return ()
