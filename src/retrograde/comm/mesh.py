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

Rule 1: nobody waits for another rank in order to send: what the connection does not take at once is sent by the
        service thread when it can. So the service threads always receive.
Rule 2: a thread that holds a line's lock does not ask for `changed`.
"""

import contextlib
import os
import selectors
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from retrograde.comm.connecting import connect
from retrograde.comm.line import LENGTHS, Line, bytes_of, frame, message_length, unwanted
from retrograde.comm.messages import Ask, Fail, Meet, Message, MessageError, Read, decode

WAIT = "ranks keep the model until all have read it: let them wait for each other (dist.barrier()) before they end"
TIMEOUT = 60.0  # seconds
_EARLY = 4096  # messages for engines and pipelines that this rank has not made yet
GONE = f"so a process ended or gave up; its own output says why. If it had merely finished: {WAIT}"


class Receiver(Protocol):
    """An engine's or a pipeline's end of the mesh. Called by the service thread, with `Mesh.changed` held if not said
    otherwise."""

    number: int  # given by the mesh: the same on all ranks

    def room(self, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong; None if nobody wants them any more. Called without `changed`."""

    def on_message(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None: ...

    def on_lost(self, cause: str, error: Exception) -> None: ...


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
        self._early: defaultdict[int, list[tuple[int, Message]]] = defaultdict(list)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}
        for peer, sock in sockets:
            self._lines[peer] = Line(sock, self._selector, self._incoming(peer))
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

    # ---- sending
    def send(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> int:
        """Send a message and its tensors to another rank's service thread. Give what it returns to `sent`."""
        return self._lines[dst].send(frame(message, data))

    def sent(self, dst: int, mark: int) -> bool:
        """May the tensors of that message change again?"""
        return self._lines[dst].sent >= mark

    # ---- the service thread
    def _serve(self) -> None:
        peers = {line: peer for peer, line in self._lines.items()}
        while self._selector.get_map():
            for key, ready in self._selector.select():
                line: Line = key.data
                try:
                    if ready & selectors.EVENT_WRITE:
                        line.send()
                        with self.changed:
                            self.changed.notify_all()  # somebody may wait for this to be sent
                    if ready & selectors.EVENT_READ:
                        line.receive()
                except Exception as error:  # whatever it is: those who wait are told
                    line.close()
                    self._lost(self._describe_loss(peers[line], error), error)

    def _describe_loss(self, peer: int, error: Exception) -> str:
        if isinstance(error, OSError):
            return f"the connection to rank {peer} was lost, {GONE}"
        return (
            f"the connection to rank {peer} was closed by this rank, which could not take what came from there: "
            f"{type(error).__name__}: {error}"
        )

    def _incoming(self, src: int) -> Iterator[memoryview]:
        """Memory to be filled with what comes from `src`, piece by piece; complete messages are delivered."""
        lengths = bytearray(LENGTHS.size)
        while True:
            yield memoryview(lengths)
            size, extra = LENGTHS.unpack(lengths)
            body = bytearray(message_length(size))
            yield memoryview(body)
            message = decode(body)
            data = self._room(src, message, extra)
            if data is None:
                yield from unwanted(extra)
                data = ()
            else:
                yield from [bytes_of(tensor) for tensor in data if tensor.numel()]
            with self.changed:
                self._deliver(src, message, data)
                del body, message, data  # nothing is kept: who waits for it may count references to a page

    def _room(self, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
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

    def _deliver(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None:
        if message.receiver >= len(self._receivers):
            if sum(map(len, self._early.values())) >= _EARLY:
                raise MessageError(f"more than {_EARLY} messages for engines that this rank has not made")
            self._early[message.receiver].append((src, message))
        elif (receiver := self._receivers[message.receiver]()) is not None:
            receiver.on_message(src, message, data)
        elif isinstance(message, Read | Meet | Ask):  # what needs an answer
            text = f"rank {self.rank} has let go of this model, which rank {src} needs; {WAIT}"
            self.send(src, Fail(message.receiver, text))

    def _lost(self, cause: str, error: Exception) -> None:
        with self.changed:
            for reference in self._receivers:
                if (receiver := reference()) is not None:
                    receiver.on_lost(cause, error)
            self.changed.notify_all()

    def _leave(self, process: int) -> None:
        """The group or the process ends: what others were promised is sent first."""
        if os.getpid() != process:
            return  # forked: the connections are its parent's
        with self.changed:
            self.changed.wait_for(lambda: all(line.sent >= line.queued for line in self._lines.values()), 5.0)
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # lost already
                line.socket.shutdown(socket.SHUT_RDWR)  # both service threads find the end
