"""One engine's end of the mesh: read a shard, put a gradient, meet the others.

A *meeting* is the only point at which ranks wait for each other's main thread. Every rank brings its
position (why it came and what it has to offer) and leaves with everybody's, so all ranks see the same
sequence of meetings and can draw the same conclusions from it. That replaces an agreed order of
collectives: positions need not be equal, they only have to be reconcilable (reduction/council.py).
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from retrograde.comm.mesh import GONE, Mesh, keep_sending
from retrograde.errors import DivergenceError


class Kind(StrEnum):
    """Why a rank came to a meeting, most urgent first (see reduction/council.py)."""

    BACKWARD = "the end of a backward"
    FENCE = "an edit of the weights"
    FLUSH = "a reduction of pending gradients"
    STEP = "an optimizer step"
    TOTAL = "a value over all ranks"


@dataclass(frozen=True, slots=True)
class Position:
    kind: Kind
    label: str
    offers: Any = None


class Stamp(NamedTuple):
    """Which state of a unit's shards a reader needs: see residency/gate.py."""

    clock: int
    edits: int
    stray: int


class Key(NamedTuple):
    """A put gradient: of which unit, after which meeting, and the how-manieth since then (reduction/exchange.py)."""

    unit: int
    meeting: int
    turn: int


# Asked by the service thread: a unit's shard in the state that a reader needs, else why it is not to be had (yet).
Serve = Callable[[int, Stamp], torch.Tensor | str]
Reading = Callable[[], None]  # a page-in under way: returns when every part has arrived
_Request = tuple[int, int, Stamp, int]  # who reads, which unit, in which state, under which tag
_Arrival = tuple[torch.Tensor, list[Any]]  # a gradient, and the works that bring its parts


@dataclass(slots=True, weakref_slot=True, eq=False)
class Station:
    mesh: Mesh
    timeout: float
    serve: Serve = field(init=False)
    number: int = -1
    failure: str | None = None
    notices: dict[int, str] = field(default_factory=dict)  # by tag, or by -rank-1 for what `ask` asks
    where: str = "not started"
    meetings: int = 0
    _met: dict[int, dict[int, Position]] = field(default_factory=dict)
    _requests: list[_Request] = field(default_factory=list)
    _served: deque[Any] = field(default_factory=deque)
    _lost: Exception | None = None  # what the backend said when a connection broke
    _arrivals: dict[tuple[Key, int], _Arrival] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh.attach(self)

    # ---- reading pages
    def read(self, unit: int, name: str, stamp: Stamp, into: Callable[[int], torch.Tensor]) -> Reading:
        """Start reading every peer's shard of `unit` into `into(rank)`. Call what it returns once, to wait for them."""
        self.check()
        works = []
        for src in self.mesh.peers:
            tag = self.mesh.next_tag(mine=False)
            with self._reaching(src):
                works.append((src, self.mesh.irecv(into(src), src, tag), tag))
                self.mesh.send(src, "read", self.number, unit, stamp, tag)

        def wait() -> None:
            for src, work, tag in works:
                self.finish(work, f"to page in unit {name} from rank {src}", tag)
                self.notices.pop(tag, None)

        return wait

    def finish(self, work: Any, what: str, tag: int = -1) -> None:
        """Wait for a transfer, once. What goes wrong is told in our words, not in the backend's."""
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            late = time.monotonic() - began >= self.timeout
            silent = self.notices.get(tag, "it did not answer")
            cause = silent if late else f"the connection was lost, {GONE}"
            self.fail(f"rank {self.mesh.rank} waited {time.monotonic() - began:.0f} s {what}: {cause}", error)

    def answer_waiting(self) -> None:
        """The main thread changed something a reader may be waiting for."""
        if self._requests:
            with self.mesh.changed:
                self._requests = [request for request in self._requests if not self._answer(*request)]

    def _answer(self, src: int, unit: int, stamp: Stamp, tag: int) -> bool:
        found = self.serve(unit, stamp)
        if isinstance(found, str):
            self.mesh.send(src, "notice", self.number, tag, found)
            return False
        keep_sending(self._served, self.mesh.isend(found, src, tag))
        return True

    def finish_serving(self) -> None:
        """After a fence every reader has what it asked for: let go of the shards that were sent."""
        with self.mesh.changed:
            served, self._served = self._served, deque()
        for work in served:
            self.finish(work, "for a reader to take a shard")

    # ---- putting gradients
    def put(self, key: Key, dst: int, parts: list[torch.Tensor]) -> list[Any]:
        """Start sending `parts` to `dst`, whose service thread takes them as one; the works are done when sent."""
        tags = [self.mesh.next_tag(mine=True) for _ in parts]
        sizes, dtype = [part.numel() for part in parts], parts[0].dtype
        with self._reaching(dst):
            self.mesh.send(dst, "put", self.number, key, sizes, dtype, tags)
            return [self.mesh.isend(part, dst, tag) for part, tag in zip(parts, tags, strict=True)]

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        """What `src` put under `key`; it said so at a meeting, so it is there or on its way."""
        self._wait_for(lambda: [] if self.arrived(key, src) else [src], f"its gradient of unit {unit}")
        with self.mesh.changed:
            chunk, works = self._arrivals.pop((key, src))
        for work in works:
            self.finish(work, f"for the gradient of unit {unit} from rank {src}")
        return chunk

    def arrived(self, key: Key, src: int) -> bool:
        """Is what `src` put under `key` here or on its way?"""
        return (key, src) in self._arrivals

    def discard_arrivals(self) -> None:
        """At a step: what was put before this meeting and nobody took belongs to backwards that were given up."""
        with self.mesh.changed:
            stale = [(key, src) for key, src in self._arrivals if key.meeting < self.meetings]
            given_up = [work for place in stale for work in self._arrivals.pop(place)[1]]
        for work in given_up:
            self.finish(work, "for a gradient of a backward that was given up")

    # ---- meeting
    def meet(self, position: Position) -> list[Position]:
        """Wait for every rank to come to its next meeting; returns everybody's position by rank."""
        self.meetings += 1
        number = self.meetings
        self.where = f"waiting for the other ranks at {position.kind} ({position.label})"
        for peer in self.mesh.peers:
            with self._reaching(peer):
                self.mesh.send(peer, "meet", self.number, number, position)

        def missing() -> list[int]:
            return [p for p in self.mesh.peers if p not in self._met.get(number, {})]

        self._wait_for(missing, f"{position.kind} ({position.label})")
        self.where = f"outside retrograde, after {position.kind} ({position.label})"
        met = self._met.pop(number, {})
        met[self.mesh.rank] = position
        return [met[rank] for rank in range(self.mesh.world)]

    @contextlib.contextmanager
    def _reaching(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.check()
            self.fail(f"rank {self.mesh.rank}: rank {peer} cannot be reached, {GONE}", error)

    def check(self) -> None:
        if self.failure is not None:
            raise DivergenceError(self.failure) from self._lost

    def fail(self, text: str, cause: BaseException | None = None) -> None:
        """Give up on every rank: tell the others, then raise."""
        self._announce(text)
        raise DivergenceError(self.failure) from cause

    def _announce(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            for peer in self.mesh.peers:
                with contextlib.suppress(RuntimeError):  # gloo closes a pair on which a wait timed out
                    self.mesh.send(peer, "fail", self.number, failure)

    @contextlib.contextmanager
    def shared_fate(self, what: str) -> Iterator[None]:
        """What goes wrong inside on one rank is told to the others, which would wait for it in vain."""
        try:
            yield
        except DivergenceError:
            raise
        except Exception as error:
            self._announce(f"rank {self.mesh.rank}: {what} raised {type(error).__name__}: {error}")
            raise

    def _wait_for(self, missing: Callable[[], list[int]], what: str) -> None:
        self.check()
        with self.mesh.changed:
            if self.mesh.changed.wait_for(lambda: not missing() or self.failure is not None, self.timeout):
                self.check()
                return
            absent = missing()
        for peer in absent:
            self.notices.pop(-peer - 1, None)
            with contextlib.suppress(RuntimeError):
                self.mesh.send(peer, "ask", self.number)
        with self.mesh.changed:
            self.mesh.changed.wait_for(lambda: all(-p - 1 in self.notices for p in absent), 1.0)
        places = "; ".join(f"rank {p} is {self.notices.get(-p - 1, 'not answering')}" for p in absent)
        self.fail(
            f"rank {self.mesh.rank} waited {self.timeout:g} s for rank(s) {', '.join(map(str, absent))} "
            f"at {what}, but {places}. Let every rank come to the same steps (they may skip units, "
            f"reorder them or do fewer backwards), or raise shard(timeout=...)"
        )

    # ---- the service thread's side, which holds `mesh.changed`
    def on_message(self, src: int, op: str, args: tuple[Any, ...]) -> None:
        """`op` is what the sender gave `Mesh.send`; its handler is the method `_on_{op}`."""
        getattr(self, f"_on_{op}")(src, *args)

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = error
        self.failure = self.failure or f"rank {self.mesh.rank}: {cause}"

    def _on_read(self, src: int, unit: int, stamp: Stamp, tag: int) -> None:
        if not self._answer(src, unit, stamp, tag):
            self._requests.append((src, unit, stamp, tag))

    def _on_put(self, src: int, key: Key, sizes: list[int], dtype: torch.dtype, tags: list[int]) -> None:
        chunk = torch.empty(sum(sizes), dtype=dtype)
        parts = zip(torch.split(chunk, sizes), tags, strict=True)
        works = [self.mesh.irecv(part, src, tag) for part, tag in parts]
        self._arrivals[key, src] = (chunk, works)
        self.mesh.changed.notify_all()

    def _on_meet(self, src: int, number: int, position: Position) -> None:
        self._met.setdefault(number, {})[src] = position
        self.mesh.changed.notify_all()

    def _on_notice(self, src: int, tag: int, text: str) -> None:
        self.notices[tag] = text
        self.mesh.changed.notify_all()

    def _on_ask(self, src: int) -> None:
        self.mesh.send(src, "notice", self.number, -self.mesh.rank - 1, self.where)

    def _on_fail(self, src: int, text: str) -> None:
        self.failure = self.failure or text
        self.mesh.changed.notify_all()
