"""The ranks of one process group, with a service thread on each.

[Note: one-sided communication]
A collective needs every rank to call it, in one order. A free-form backward does not give that: a rank may
skip a unit, use another one, run an evaluation of its own or do one backward more. So nothing on the data
path here is a collective. A rank that wants a page *reads* the other ranks' shards, a rank that has a
gradient *puts* each owner's part there, and the other side is a small service thread that answers whatever
its main thread is doing. Messages carry unit and sequence, so data of two units cannot mix, and no order
has to be shared. Ranks *meet* (one_sided.py) only where they must agree: at the end of a backward, at a step.

torch.distributed brings the ranks together (connecting.py); from then on each pair has a connection of its own
(line.py). (gloo's point to point operations must be posted on both sides, cannot be polled, spend a fifth of a
millisecond on a small message and close the connection when one of them times out.)

[Note: the first cause]
When a rank dies, others raise because of it and leave, and more raise because of these. All must name the rank that
died. So a rank that finds a connection lost waits for a moment (`GRACE`), in which it may hear what its other side, or
anybody, knows to have gone wrong before. Then it decides on a cause, tells all ranks, and only then its own main
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist

from retrograde.torch_internals import store_of
from retrograde.transport import leaving
from retrograde.transport.connecting import connect
from retrograde.transport.line import LENGTHS, Line, bytes_of, frame, message_length, unwanted
from retrograde.transport.mapped.neighbours import Neighbours, neighbours_of
from retrograde.transport.messages import (
    Ask,
    Fail,
    FirstCause,
    Goodbye,
    Mapped,
    Meet,
    Message,
    MessageError,
    Read,
    Share,
    ToRank,
    ToReceiver,
    decode,
)

KEEP = "keep the model until all ranks have read it: delete it after a dist.barrier(), or leave it to the program's end"
TIMEOUT = 60.0  # seconds
GRACE = 0.1  # seconds between a lost connection and its being blamed
_FLUSH = 1.0  # seconds in which a rank that fails says so
_CLOSED = 2.0  # seconds after which a connection that takes nothing more is known to be lost
_EARLY = 4096  # messages for engines and pipelines that this rank has not made yet
_LETTERS = 0.5  # seconds after which letters that nobody has taken are looked at
GONE = "so its process ended or gave up; its own output says why"


class Receiver(Protocol):
    """An engine's or a pipeline's end of the connections.

    Called by the service thread, with `Connections.changed` held if not said otherwise."""

    number: int  # given by the connections: the same on all ranks
    timeout: float  # seconds for which a rank that has finished waits for others that ask for nothing

    def destination(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong; None if nobody wants them any more. Called without `changed`."""

    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None: ...

    def on_lost(self, cause: str, error: Exception) -> None:
        """Something has gone wrong with a rank: whoever waits does so in vain. Called once."""

    def unsaid(self) -> str | None:
        """What has gone wrong, if the main thread has not been told by an exception."""


class Cause(NamedTuple):
    """What went wrong first: with which rank, in words, and the error by which it was noticed here."""

    rank: int
    text: str
    error: Exception


class Suspicion(NamedTuple):
    """A lost connection that may be the consequence of something else; at `until` it counts as a cause."""

    until: float
    cause: Cause


class Connections:
    """Messages between the ranks of a group. Use `Connections.of(group)`: made once for each group."""

    _by_group: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Connections]"] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float = TIMEOUT) -> "Connections":
        """The group's connections, made at the first call: all ranks must come to it within `timeout` seconds."""
        if group not in cls._by_group:
            rank, world = dist.get_rank(group), dist.get_world_size(group)
            sockets = connect(store_of(group), rank, world, timeout) if world > 1 else []
            together = bool(sockets) and all(sock.family == socket.AF_UNIX for _, sock in sockets)
            neighbours = neighbours_of(rank, world) if together else None
            cls._by_group[group] = made = cls(rank, world, sockets, group, neighbours)
            weakref.finalize(group, made.say_goodbye).atexit = False  # leaving.py has the end of the process
            if made._lines:
                leaving.watch(made, cls._by_group.get)
        return cls._by_group[group]

    def __init__(
        self,
        rank: int,
        world: int,
        sockets: Iterable[tuple[int, socket.socket]],
        group: dist.ProcessGroup | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.neighbours = neighbours  # where all ranks are on one host
        self._sleepers = 0  # threads of this rank that wait for letters
        self._group = None if group is None else weakref.ref(group)
        self.changed = threading.Condition()
        self._receivers: list[weakref.ref[Receiver]] = []  # engines and pipelines
        self._early: defaultdict[int, list[tuple[int, ToReceiver]]] = defaultdict(list)
        self._selector = selectors.DefaultSelector()
        self.process = os.getpid()
        self.departed: set[int] = set()  # ranks that have said goodbye
        self._leaving = False  # this rank has finished, or failed
        self._said_goodbye = False
        self._gives_up = False  # it waits no longer
        self._heard_at = time.monotonic()  # when somebody last said something
        self._cause: Cause | None = None
        self._suspicions: list[Suspicion] = []  # oldest first
        self._lines: dict[int, Line] = {}
        for peer, sock in sockets:
            self._lines[peer] = Line(peer, sock, self._selector, self._incoming(peer))
        self._connected = set(self._lines)
        self._ended = not self._lines  # all connections are closed
        if self._lines:
            self._bell, self._ear = socket.socketpair()  # to wake the service thread
            self._bell.setblocking(False)
            self._ear.setblocking(False)
            self._selector.register(self._ear, selectors.EVENT_READ)
            threading.Thread(target=self._serve, name="retrograde-service", daemon=True).start()
        if neighbours is not None:
            for peer in self.peers:
                self.tell(peer, Share(neighbours.process, neighbours.arena.descriptor))

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

    def post(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> bool:
        """Leave a letter for another rank's main thread; says whether it has a box on this host, and room in it."""
        neighbour = None if self.neighbours is None else self.neighbours.found.get(dst)
        return neighbour is not None and neighbour.outbox.post(frame(message, data))

    def sent(self, dst: int, mark: int) -> bool:
        """May the tensors of that message change again?"""
        return self._lines[dst].sent >= mark

    def why_lost(self, dst: int) -> str:
        """Why nothing can be sent to a rank: it closed the connection, and has perhaps said why before that."""
        with self.changed:
            self.changed.wait_for(lambda: self._cause is not None or self._ended, _CLOSED)
            if self._cause is not None:
                return self._cause.text
            if self._ended:
                return (
                    "all ranks have left this process group (dist.destroy_process_group(), or the end of the program), "
                    "so other ranks' shards cannot be read any more"
                )
            return f"rank {dst} cannot be reached, {GONE}"

    # ---- waiting
    def notify(self) -> None:
        """Something has changed, for whoever waits. With `changed` held."""
        self.changed.notify_all()
        if self.neighbours is not None and self._sleepers:
            self.neighbours.mailbox.ring()

    def wait_until(self, over: Callable[[], bool], timeout: float, look_again: float | None = None) -> None:
        """Wait, with `changed` held once, until `over()` or for `timeout` seconds."""
        if self.neighbours is None:
            self.changed.wait_for(over, timeout)
            return
        mailbox, end = self.neighbours.mailbox, time.monotonic() + timeout
        while True:
            heard = mailbox.heard  # before anything is looked at: what changes after that rings again
            self.take_letters()
            if over() or (left := end - time.monotonic()) <= 0:
                break
            self._sleepers += 1
            self.changed.release()
            try:
                mailbox.sleep(heard, left if look_again is None else min(left, look_again))
            finally:
                self.changed.acquire()
                self._sleepers -= 1
        self.take_letters()  # of a rank that has said goodbye since

    def take_letters(self) -> None:
        """What other ranks' main threads have left for this one's. Also the service thread takes them, now and then."""
        if self.neighbours is None:
            return
        with self.changed:
            for src, letter in self.neighbours.mailbox.letters():
                try:
                    self._open(src, memoryview(letter))
                except Exception as error:  # whatever it is: those who wait are told
                    self._refuse(self._lines[src], error)

    def _open(self, src: int, letter: memoryview) -> None:
        size, extra = LENGTHS.unpack(letter[: LENGTHS.size])
        at = LENGTHS.size + size
        message = decode(bytes(letter[LENGTHS.size : at]))
        if isinstance(message, ToRank):
            raise MessageError(f"a {type(message).__name__} in a letter")
        data = self._destination(src, message, extra) or ()
        for tensor in data:
            if tensor.numel():
                bytes_of(tensor)[:] = letter[at : at + tensor.nbytes]
                at += tensor.nbytes
        self._deliver(src, message, data)

    # ---- leaving (leaving.py)
    def say_goodbye(self) -> None:
        """The service thread does it: this is called by the garbage collector too, whatever locks are held."""
        if os.getpid() != self.process:
            return  # forked: the connections are its parent's
        if self._ended:
            leaving.forget(self)
        else:
            self._leaving = True
            with contextlib.suppress(OSError):  # it is closed, or has been rung often enough
                self._bell.send(b".")

    def wait_for_goodbyes(self) -> str | None:
        kept = [reference() for reference in self._receivers]  # models that nobody but readers needs any more
        with self.changed:
            patience = max((receiver.timeout for receiver in kept if receiver is not None), default=TIMEOUT)
            self._heard_at = time.monotonic()
            while not self._ended and (left := self._heard_at + patience - time.monotonic()) > 0:
                self.changed.wait(left)
            if self._ended:
                return None
            missing = sorted(self._connected - self.departed)
        self._give_up()
        return (
            f"rank {self.rank} has finished and waited {patience:g} s for rank(s) {', '.join(map(str, missing))}, "
            f"which neither finished nor asked for anything; it leaves now. A rank that goes on needs the others: "
            f"raise shard(timeout=...)"
        )

    def abandon(self, why: str) -> None:
        self._decide(Cause(self.rank, why, ConnectionError("this rank has failed")))
        with self.changed:
            self.changed.wait_for(lambda: all(line.sent >= line.queued for line in self._lines.values()), _FLUSH)
        self._give_up()

    def _give_up(self) -> None:
        self._gives_up = True
        self.say_goodbye()
        with self.changed:
            self.changed.wait_for(lambda: self._ended, _FLUSH)

    def unsaid(self) -> list[str]:
        receivers = [reference() for reference in self._receivers]
        texts = [receiver.unsaid() for receiver in receivers if receiver is not None]
        return list(dict.fromkeys(text for text in texts if text is not None))

    # ---- the service thread
    def _serve(self) -> None:
        while self._connected or self._suspicions:
            self._attend(self._patience())
            if self._suspicions and self._patience() == 0.0:
                self._attend(0.0)  # has anybody said more in the meantime?
                self._blame()
            self.take_letters()  # for an engine that is gone, its main thread takes none
            if self._leaving:
                self._leave()
        self._ear.close()
        self._bell.close()
        self._selector.close()
        if self._leaving:
            leaving.forget(self)
        with self.changed:
            self._ended = True
            self.notify()

    def _patience(self) -> float | None:
        """Seconds until there is something to do even if nothing comes."""
        idle = None if self.neighbours is None else _LETTERS
        if not self._suspicions:
            return idle
        with self.changed:
            return max(0.0, self._suspicions[0].until - time.monotonic()) if self._suspicions else idle

    def _blame(self) -> None:
        with self.changed:
            if self._suspicions:
                self._decide(self._suspicions[0].cause)

    def _leave(self) -> None:
        """Say goodbye, and close all connections when everybody has said it."""
        if not self._said_goodbye and self._cause is None:
            self._said_goodbye = True
            if self.neighbours is not None:
                self.neighbours.mailbox.finish()
            for peer in self.peers:
                self.tell(peer, Goodbye())
        with self.changed:
            needless = self._connected <= self.departed or self._cause is not None
        all_sent = all(line.sent >= line.queued for line in self._lines.values())
        if self._gives_up or (needless and all_sent):
            for peer in list(self._connected):
                self._close(self._lines[peer])

    def _close(self, line: Line) -> None:
        line.close()
        with self.changed:
            self._connected.discard(line.peer)

    def _attend(self, patience: float | None) -> None:
        for key, ready in self._selector.select(patience):
            line: Line | None = key.data
            if line is None:
                self._ear.recv(4096)
                continue
            if line.peer not in self._connected:
                continue  # closed a moment ago
            try:
                if ready & selectors.EVENT_WRITE:
                    with contextlib.suppress(OSError):  # what came before it was closed is read first
                        line.send()
                    with self.changed:
                        self.notify()  # somebody may wait for this to be sent
                if ready & selectors.EVENT_READ:
                    line.receive()
            except OSError as error:
                self._close(line)
                self._suspect(line.peer, error)
            except Exception as error:  # whatever it is: those who wait are told
                self._refuse(line, error)

    def _suspect(self, peer: int, error: Exception) -> None:
        """The connection to `peer` has ended. Why, others may know better."""
        with self.changed:
            if peer not in self.departed and self._cause is None:
                cause = Cause(peer, f"the connection to rank {peer} was lost, {GONE}", error)
                self._suspicions.append(Suspicion(time.monotonic() + GRACE, cause))
            elif not self._leaving:
                text = f"rank {peer} had finished and waited as long as its time-out says; raise shard(timeout=...)"
                self._decide(Cause(peer, text, error), tell=False)
            self.notify()

    def _refuse(self, line: Line, error: Exception) -> None:
        """What came by this line cannot be taken."""
        why = f"could not take what came from there: {type(error).__name__}: {error}"
        text = f"the connection to rank {line.peer} was closed by rank {self.rank}, which {why}"
        self._decide(Cause(line.peer, text, error))  # which tells the other side too
        self._close(line)

    def _decide(self, cause: Cause, tell: bool = True) -> None:
        """This is what went wrong first, unless something else is known already."""
        with self.changed:
            self._suspicions.clear()
            if self._cause is not None:
                return
            self._cause = cause
            if tell:  # before the main thread can leave because of it
                for peer in self.peers:
                    self.tell(peer, FirstCause(cause.rank, cause.text))
            for reference in self._receivers:
                if (receiver := reference()) is not None:
                    receiver.on_lost(cause.text, cause.error)
            self.notify()

    def _incoming(self, src: int) -> Iterator[memoryview]:
        """Memory to be filled with what comes from `src`, piece by piece; complete messages are delivered."""
        lengths = bytearray(LENGTHS.size)
        while True:
            yield memoryview(lengths)
            size, extra = LENGTHS.unpack(lengths)
            body = bytearray(message_length(size))
            yield memoryview(body)
            message = decode(body)
            if isinstance(message, ToRank):
                self._hear(src, message, extra)
                continue
            data = self._destination(src, message, extra)
            if data is None:
                yield from unwanted(extra)
                data = ()
            else:
                yield from [bytes_of(tensor) for tensor in data if tensor.numel()]
            with self.changed:
                self._deliver(src, message, data)
                del body, message, data  # nothing is kept: who waits for it may count references to a page

    def _hear(self, src: int, message: ToRank, nbytes: int) -> None:
        if nbytes:
            raise MessageError(f"{nbytes} bytes of tensors with a {type(message).__name__}")
        if isinstance(message, FirstCause):
            error = ConnectionError(f"told by rank {src}")
            self._decide(Cause(message.rank, message.text, error), tell=False)
            return
        if isinstance(message, Share | Mapped):
            self._meet_neighbour(src, message)
            return
        with self.changed:
            self.departed.add(src)
            self.notify()  # somebody may wait for that rank's main thread

    def _meet_neighbour(self, src: int, message: Share | Mapped) -> None:
        if self.neighbours is None:
            return  # this rank could not make shared memory, and the other is told nothing
        if isinstance(message, Mapped):
            self.neighbours.found_by.add(src)
        elif self.neighbours.find(src, message.process, message.descriptor):
            self.tell(src, Mapped())

    def _destination(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong: exactly as many bytes as will come."""
        if message.receiver >= len(self._receivers):
            if nbytes:
                raise MessageError(f"{nbytes} bytes of tensors for receiver {message.receiver}, which is not there yet")
            return ()
        receiver = self._receivers[message.receiver]()
        found = None if receiver is None else receiver.destination(src, message, nbytes)
        if found is not None and (expected := sum(tensor.nbytes for tensor in found)) != nbytes:
            raise MessageError(f"{nbytes} bytes of tensors with a {type(message).__name__} that takes {expected}")
        return found

    def _deliver(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        self._heard_at = time.monotonic()
        if message.receiver >= len(self._receivers):
            if sum(map(len, self._early.values())) >= _EARLY:
                raise MessageError(f"more than {_EARLY} messages for engines that this rank has not made")
            self._early[message.receiver].append((src, message))
        elif (receiver := self._receivers[message.receiver]()) is not None:
            receiver.on_message(src, message, data)
        elif isinstance(message, Read | Meet | Ask):  # what needs an answer
            text = f"rank {self.rank} has let go of this model, which rank {src} needs; {KEEP}"
            self.tell(src, Fail(message.receiver, text))
