"""One engine's end of the mesh: read a shard, put a gradient, meet the others.

A *meeting* is the only point at which ranks wait for each other's main thread. Every rank brings its
position (why it came and what it has to offer) and leaves with everybody's, so all ranks see the same
sequence of meetings and can draw the same conclusions from it. That replaces an agreed order of
collectives: positions need not be equal, they only have to be reconcilable (reduction/council.py).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

import torch

from retrograde.comm.mesh import GONE, Mesh
from retrograde.errors import DivergenceError


class Kind(StrEnum):
    """Why a rank came to a meeting, most urgent first (see reduction/council.py)."""

    BACKWARD = "the end of a backward"
    FENCE = "an edit of the weights"
    FLUSH = "a reduction of pending gradients"
    STEP = "an optimizer step"
    TOTAL = "a value over all ranks"


class Position(NamedTuple):
    """What a rank brings to a meeting: why it came, and what it has for the others.

    `launched`: gradients that it has put since its last meeting. This one adds them up, whatever the others came for.
    `pending`: gradients that it would put if this meeting turns out to flush them.
    """

    kind: Kind
    label: str
    launched: Any
    pending: Any
    value: Any = None


class Stamp(NamedTuple):
    """Which state of a unit's shards a reader needs: see residency/gate.py."""

    clock: int
    edits: int
    stray: int


class Key(NamedTuple):
    """Names a gradient that is put. Ranks that do the same things since a meeting come to the same keys.

    `meeting`: the last one before it. `attempt`: counts what was given up since then. `turn`: counts the unit's
    gradients since then (reduction/exchange.py).
    """

    unit: int
    meeting: int
    attempt: int
    turn: int


Reading = Callable[[], None]  # a page-in under way: returns when every part has arrived
Sending = tuple[int, int]  # to whom, and up to where (mesh.py)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Station:
    mesh: Mesh
    timeout: float
    # Asked by the service thread: a unit's shard in the state that a reader needs, else why it is not to be had (yet).
    serve: Callable[[int, Stamp], torch.Tensor | str] = field(init=False)
    number: int = -1
    failure: str | None = None
    _told: dict[int, str] = field(default_factory=dict)  # where others say they are, when something is amiss
    where: str = "not started"
    meetings: int = 0
    _met: dict[int, dict[int, Position]] = field(default_factory=dict)
    _requests: list[tuple[int, int, Stamp]] = field(default_factory=list)  # reader, unit, state
    _reading: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # unit, owner: where its shard belongs
    _lost: tuple[str, Exception] | None = None  # a connection
    _arrivals: dict[tuple[Key, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh.attach(self)

    # ---- reading pages
    def read(self, unit: int, name: str, stamp: Stamp, into: Callable[[int], torch.Tensor]) -> Reading:
        """Start reading every peer's shard of `unit` into `into(rank)`. What it returns waits for them."""
        self.check()
        for src in self.mesh.peers:
            self._reading[unit, src] = into(src)
            self._send(src, "read", unit, stamp)
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
        with contextlib.suppress(OSError):  # a reader that is gone
            self.mesh.send(src, "page", self.number, (unit, self.mesh.rank), data=[found])
        return True

    # ---- putting gradients
    def put(self, key: Key, dst: int, parts: list[torch.Tensor]) -> Sending:
        """Start sending `parts` to `dst`, which takes them as one. They must not change before `finish`."""
        return dst, self._send(dst, "put", key, parts[0].dtype, data=parts)

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
        for peer in self.mesh.peers:
            self._send(peer, "meet", number, position)
        self._wait_for(lambda: [p for p in self.mesh.peers if p not in self._met.get(number, {})], what)
        self.where = f"outside retrograde, after {what}"
        met = self._met.pop(number, {}) | {self.mesh.rank: position}
        return [met[rank] for rank in range(self.mesh.world)]

    def _send(self, dst: int, op: str, *args: Any, data: Sequence[torch.Tensor] = ()) -> int:
        try:
            return self.mesh.send(dst, op, self.number, *args, data=data)
        except OSError as error:
            self.check()
            return self.fail(f"rank {self.mesh.rank}: rank {dst} cannot be reached, {GONE}", error)

    def check(self) -> None:
        if self.failure is not None:
            raise DivergenceError(self.failure)

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Give up on every rank: tell the others, then raise."""
        self._announce(text)
        raise DivergenceError(self.failure) from cause

    def _announce(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            for peer in self.mesh.peers:
                with contextlib.suppress(OSError):
                    self.mesh.send(peer, "fail", self.number, failure)

    @contextlib.contextmanager
    def shared_fate(self, what: str) -> Iterator[None]:
        """What goes wrong inside on one rank is told to the others, which would wait for it in vain."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, DivergenceError):
                self._announce(f"rank {self.mesh.rank}: {what} raised {type(error).__name__}: {error}")
            raise

    def _wait_for(self, missing: Callable[[], list[int]], what: str) -> None:
        with self.mesh.changed:
            self.mesh.changed.wait_for(lambda: not missing() or self.failure or self._lost, self.timeout)
            self.check()
            if not (absent := missing()):
                return  # also where a rank has left since: it had nothing more to bring
            if self._lost is not None:
                raise DivergenceError(f"rank {self.mesh.rank}: {self._lost[0]}") from self._lost[1]
            for peer in absent:
                with contextlib.suppress(OSError):
                    self.mesh.send(peer, "ask", self.number)
            self.mesh.changed.wait_for(lambda: all(p in self._told for p in absent), 1.0)
        places = "; ".join(f"rank {p} is {self._told.get(p, 'not answering')}" for p in absent)
        self.fail(
            f"rank {self.mesh.rank} waited {self.timeout:g} s for rank(s) {', '.join(map(str, absent))} "
            f"at {what}, but {places}. Let every rank come to the same steps (they may skip units, "
            f"reorder them or do fewer backwards), or raise shard(timeout=...)"
        )

    # ---- the service thread's side, which holds `mesh.changed`
    def on_message(self, src: int, op: str, args: tuple[Any, ...]) -> None:
        """`op` is what the sender gave `Mesh.send`; its handler is the method `_on_{op}`."""
        getattr(self, f"_on_{op}")(src, *args)
        if op != "read":  # which the main thread does not wait for
            self.mesh.changed.notify_all()

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)

    def _on_read(self, src: int, unit: int, stamp: Stamp) -> None:
        if not self._answer(src, unit, stamp):
            self._requests.append((src, unit, stamp))

    def room(self, op: str, args: list[Any], nbytes: int) -> list[torch.Tensor]:
        """Where the tensors of a message belong; nowhere: nobody wants them any more."""
        if op == "page":
            return [self._reading[args[0]]] if args[0] in self._reading else []
        return [torch.empty(nbytes // args[1].itemsize, dtype=args[1])]

    def _on_page(self, src: int, shard: tuple[int, int], *data: torch.Tensor) -> None:
        self._reading.pop(shard, None)

    def _on_put(self, src: int, key: Key, dtype: torch.dtype, *data: torch.Tensor) -> None:
        self._arrivals[key, src] = data[0] if data else torch.empty(0, dtype=dtype)  # of a unit without elements

    def _on_meet(self, src: int, number: int, position: Position) -> None:
        self._met.setdefault(number, {})[src] = position

    def _on_ask(self, src: int) -> None:
        answers = [self.serve(unit, stamp) for reader, unit, stamp in self._requests if reader == src]
        self.mesh.send(src, "tell", self.number, "; ".join([self.where, *{a for a in answers if isinstance(a, str)}]))

    def _on_tell(self, src: int, where: str) -> None:
        self._told[src] = where

    def _on_fail(self, src: int, text: str) -> None:
        self.failure = self.failure or text
