"""The ranks of one process group, with a service thread on each.

[Note: one-sided communication]
A collective needs every rank to call it, in one order. A free-form backward does not give that: a rank may
skip a unit, use another one, run an evaluation of its own or do one backward more. So nothing on the data
path here is a collective. A rank that wants a page *reads* the other ranks' shards, a rank that has a
gradient *puts* each owner's part there, and the other side is a small service thread that answers whatever
its main thread is doing. Messages carry unit and sequence, so data of two units cannot mix, and no order
has to be shared. Ranks *meet* (station.py) only where they must agree: at the end of a backward, at a step.

torch.distributed brings the ranks together (connecting.py); from then on each pair has a connection of its own
(line.py). (gloo's point to point operations must be posted on both sides, cannot be polled, spend a fifth of a
millisecond on a small message and close the connection when one of them times out.)

[Note: the first cause]
When a rank dies, others raise because of it and leave, and more raise because of these. All must name the rank that
died. So a rank that finds a connection lost waits for a moment (`GRACE`), in which it may hear what its other side, or
anybody, knows to have gone wrong before. Then it settles on a cause, tells all ranks, and only then its own main
thread, which may raise and leave. Whoever has heard of a cause keeps to it.

Rule 1: nobody waits for another rank in order to send: what the connection does not take at once is sent by the
        service thread when it can. So the service threads always receive.
Rule 2: a thread that holds a line's lock does not ask for `changed`.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from retrograde.comm.connecting import connect
from retrograde.comm.line import LENGTHS, Line, bytes_of, frame, message_length, unwanted
from retrograde.comm.messages import Ask, Fail, FirstCause, Meet, Message, MessageError, Read, ToReceiver, decode

WAIT = "ranks keep the model until all have read it: let them wait for each other (dist.barrier()) before they end"
TIMEOUT = 60.0  # seconds
GRACE = 0.1  # seconds between a lost connection and its being blamed
_CLOSED = 2.0  # seconds after which a connection that takes nothing more is known to be lost
_EARLY = 4096  # messages for engines and pipelines that this rank has not made yet
GONE = f"so a process ended or gave up; its own output says why. If it had merely finished: {WAIT}"


class Receiver(Protocol):
    """An engine's or a pipeline's end of the mesh. Called by the service thread, with `Mesh.changed` held if not said
    otherwise."""

    number: int  # given by the mesh: the same on all ranks

    def room(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong; None if nobody wants them any more. Called without `changed`."""

    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None: ...

    def on_lost(self, cause: str, error: Exception) -> None:
        """Something has gone wrong with a rank: whoever waits does so in vain. Called once."""


class Cause(NamedTuple):
    """What went wrong first: with which rank, in words, and the error by which it was noticed here."""

    rank: int
    text: str
    error: Exception


class Suspicion(NamedTuple):
    """A lost connection that may be the consequence of something else; at `until` it counts as a cause."""

    until: float
    cause: Cause


class Mesh:
    """Messages between the ranks of a group. Use `Mesh.of(group)`: one per group."""

    _meshes: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Mesh]"] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float = TIMEOUT) -> "Mesh":
        """The group's mesh. It is made at the first call, for which all ranks must come within `timeout` seconds."""
        if group not in cls._meshes:
            rank, world = dist.get_rank(group), dist.get_world_size(group)
            sockets = connect(_get_process_group_store(group), rank, world, timeout) if world > 1 else ()
            cls._meshes[group] = mesh = cls(rank, world, sockets, group)
            weakref.finalize(group, mesh._leave, os.getpid())  # or when the process ends
        return cls._meshes[group]

    def __init__(
        self,
        rank: int,
        world: int,
        sockets: Iterable[tuple[int, socket.socket]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self._group = None if group is None else weakref.ref(group)
        self.changed = threading.Condition()
        self._receivers: list[weakref.ref[Receiver]] = []  # engines and pipelines
        self._early: defaultdict[int, list[tuple[int, ToReceiver]]] = defaultdict(list)
        self._selector = selectors.DefaultSelector()
        self._cause: Cause | None = None
        self._suspicions: list[Suspicion] = []  # oldest first; the service thread's own
        self._lines: dict[int, Line] = {}
        for peer, sock in sockets:
            self._lines[peer] = Line(peer, sock, self._selector, self._incoming(peer))
        if self._lines:
            threading.Thread(target=self._serve, name="retrograde-service", daemon=True).start()

    def group(self) -> dist.ProcessGroup | None:
        return None if self._group is None else self._group()

    @property
    def peers(self) -> Iterator[int]:
        """The other ranks, nearest first, so that not everybody asks rank 0 at once."""
        return ((self.rank + step) % self.world for step in range(1, self.world))

    def attach(self, receiver: Receiver) -> None:
        """Number a receiver and deliver what came before it was there. They are created in one order on all ranks, so
        the number is shared.

        Held weakly: messages for one that is gone are dropped, and its number is not given out again.
        """
        with self.changed:
            receiver.number = len(self._receivers)
            self._receivers.append(weakref.ref(receiver))
            for src, message in self._early.pop(receiver.number, []):
                receiver.on_message(src, message, ())
            if self._cause is not None:
                receiver.on_lost(self._cause.text, self._cause.error)

    # ---- sending
    def send(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> int:
        """Send a message and its tensors to another rank's service thread. Give what it returns to `sent`."""
        return self._lines[dst].send(frame(message, data))

    def tell(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> None:
        """Send what needs no answer. That the other side is gone is found when its line is read to the end."""
        with contextlib.suppress(OSError):
            self.send(dst, message, data)

    def sent(self, dst: int, mark: int) -> bool:
        """May the tensors of that message change again?"""
        return self._lines[dst].sent >= mark

    def why_lost(self, dst: int) -> str:
        """Why nothing can be sent to a rank: it closed the connection, and has perhaps said why before that."""
        with self.changed:
            self.changed.wait_for(lambda: self._cause is not None, _CLOSED)
            return f"rank {dst} cannot be reached, {GONE}" if self._cause is None else self._cause.text

    # ---- the service thread
    def _serve(self) -> None:
        while self._selector.get_map() or self._suspicions:
            self._attend(self._patience())
            if self._suspicions and time.monotonic() >= self._suspicions[0].until:
                self._attend(0.0)  # has anybody said more in the meantime?
                if self._suspicions:
                    self._settle(self._suspicions[0].cause)

    def _patience(self) -> float | None:
        """Seconds until there is something to do even if nothing comes."""
        if not self._suspicions:
            return None
        return max(0.0, self._suspicions[0].until - time.monotonic())

    def _attend(self, patience: float | None) -> None:
        for key, ready in self._selector.select(patience):
            line: Line = key.data
            try:
                if ready & selectors.EVENT_WRITE:
                    with contextlib.suppress(OSError):  # what came before it was closed is read first
                        line.send()
                    with self.changed:
                        self.changed.notify_all()  # somebody may wait for this to be sent
                if ready & selectors.EVENT_READ:
                    line.receive()
            except OSError as error:
                line.close()
                self._suspect(line.peer, error)
            except Exception as error:  # whatever it is: those who wait are told
                self._refuse(line, error)

    def _suspect(self, peer: int, error: Exception) -> None:
        """The connection to `peer` has ended. Why, others may know better."""
        if self._cause is None:
            cause = Cause(peer, f"the connection to rank {peer} was lost, {GONE}", error)
            self._suspicions.append(Suspicion(time.monotonic() + GRACE, cause))

    def _refuse(self, line: Line, error: Exception) -> None:
        """What came by this line cannot be taken."""
        why = f"could not take what came from there: {type(error).__name__}: {error}"
        text = f"the connection to rank {line.peer} was closed by rank {self.rank}, which {why}"
        self._settle(Cause(line.peer, text, error))  # which tells the other side too
        line.close()

    def _settle(self, cause: Cause, tell: bool = True) -> None:
        """This is what went wrong first, unless something else is known already."""
        with self.changed:
            self._suspicions.clear()
            if self._cause is not None:
                return
            self._cause = cause
            for peer in self.peers if tell else ():  # before the main thread can leave because of it
                self.tell(peer, FirstCause(cause.rank, cause.text))
            for reference in self._receivers:
                if (receiver := reference()) is not None:
                    receiver.on_lost(cause.text, cause.error)
            self.changed.notify_all()

    def _incoming(self, src: int) -> Iterator[memoryview]:
        """Memory to be filled with what comes from `src`, piece by piece; complete messages are delivered."""
        lengths = bytearray(LENGTHS.size)
        while True:
            yield memoryview(lengths)
            size, extra = LENGTHS.unpack(lengths)
            body = bytearray(message_length(size))
            yield memoryview(body)
            message = decode(body)
            if isinstance(message, FirstCause):
                self._hear(src, message, extra)
                continue
            data = self._room(src, message, extra)
            if data is None:
                yield from unwanted(extra)
                data = ()
            else:
                yield from [bytes_of(tensor) for tensor in data if tensor.numel()]
            with self.changed:
                self._deliver(src, message, data)
                del body, message, data  # nothing is kept: who waits for it may count references to a page

    def _hear(self, src: int, message: FirstCause, nbytes: int) -> None:
        if nbytes:
            raise MessageError(f"{nbytes} bytes of tensors with a {type(message).__name__}")
        error = ConnectionError(f"told by rank {src}")
        self._settle(Cause(message.rank, message.text, error), tell=False)

    def _room(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong: exactly as many bytes as will come."""
        if message.receiver >= len(self._receivers):
            if nbytes:
                raise MessageError(f"{nbytes} bytes of tensors for receiver {message.receiver}, which is not there yet")
            return ()
        receiver = self._receivers[message.receiver]()
        room = None if receiver is None else receiver.room(src, message, nbytes)
        if room is not None and (expected := sum(tensor.nbytes for tensor in room)) != nbytes:
            raise MessageError(f"{nbytes} bytes of tensors with a {type(message).__name__} that takes {expected}")
        return room

    def _deliver(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        if message.receiver >= len(self._receivers):
            if sum(map(len, self._early.values())) >= _EARLY:
                raise MessageError(f"more than {_EARLY} messages for engines that this rank has not made")
            self._early[message.receiver].append((src, message))
        elif (receiver := self._receivers[message.receiver]()) is not None:
            receiver.on_message(src, message, data)
        elif isinstance(message, Read | Meet | Ask):  # what needs an answer
            text = f"rank {self.rank} has let go of this model, which rank {src} needs; {WAIT}"
            self.tell(src, Fail(message.receiver, text))

    def _leave(self, process: int) -> None:
        """The group or the process ends: what others were promised is sent first."""
        if os.getpid() != process:
            return  # forked: the connections are its parent's
        with self.changed:
            self.changed.wait_for(lambda: all(line.sent >= line.queued for line in self._lines.values()), 5.0)
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # lost already
                line.socket.shutdown(socket.SHUT_RDWR)  # both service threads find the end
