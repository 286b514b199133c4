"""The ranks of one process group, with a service thread on each.

[Note: one-sided communication]
A collective needs every rank to call it, in one order. A free-form backward does not give that: a rank may
skip a unit, use another one, run an evaluation of its own or do one backward more. So nothing on the data
path here is a collective. A rank that wants a page *reads* the other ranks' shards, a rank that has a
gradient *puts* each owner's part there, and the other side is a small service thread that answers whatever
its main thread is doing. Messages carry unit and sequence, so data of two units cannot mix, and no order
has to be shared. Ranks *meet* (station.py) only where they must agree: at the end of a backward, at a step.

torch.distributed brings the ranks together; from then on each pair has a connection of its own. (gloo's point to point
operations must be posted on both sides, cannot be polled, spend a fifth of a millisecond on a small message and close
the connection when one of them times out.) A message is a pickled head and the bytes of some tensors, which are sent
from where they are and received where they belong.

Rule 1: nobody waits for another rank in order to send: what the connection does not take at once is sent by the
        service thread when it can. So the service threads always receive.
Rule 2: a thread that holds a line's lock does not ask for `changed`.
"""

import contextlib
import os
import pickle
import secrets
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_process_group_store

WAIT = "ranks keep the model until all have read it: let them wait for each other (dist.barrier()) before they end"
GONE = f"so a process ended or gave up; its own output says why. If it had merely finished: {WAIT}"
_HEAD = struct.Struct("<QQ")  # bytes of the pickled part, bytes of the tensors
_HELLO = struct.Struct("<16sQ")  # the secret of the rank that is called, the rank that calls
_PARTS = 64  # pieces of memory for one system call


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class _Line:
    """The connection to one rank: what has been received of a message, and what is still to be sent."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, messages: Iterator[memoryview]) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.socket, self._selector, self._lock = sock, selector, threading.Lock()
        self._messages, self._into = messages, next(messages)
        self._out: deque[memoryview] = deque()
        self.queued = self.sent = 0
        selector.register(sock, selectors.EVENT_READ, self)

    def send(self, parts: Sequence[memoryview] = ()) -> int:
        """Send what goes at once, of these parts and those before; the selector tells when more can.

        What it returns is reached by `sent` when all of it has gone."""
        with self._lock:
            self._out += parts
            self.queued += sum(map(len, parts))
            with contextlib.suppress(BlockingIOError):
                while self._out:
                    gone = self.socket.sendmsg([self._out[i] for i in range(min(len(self._out), _PARTS))])
                    self.sent += gone
                    while self._out and gone >= len(self._out[0]):
                        gone -= len(self._out.popleft())
                    if gone:
                        self._out[0] = self._out[0][gone:]
            writing = selectors.EVENT_WRITE if self._out else 0
            self._selector.modify(self.socket, selectors.EVENT_READ | writing, self)
            return self.queued

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PARTS):  # then it is another line's turn
                if not (got := self.socket.recv_into(self._into)):
                    raise ConnectionResetError("the other side has closed the connection")
                self._into = self._into[got:] if got < len(self._into) else memoryview(b"")
                self._into = self._into or next(self._messages)  # delivers what is complete: its memory is let go of

    def close(self) -> None:
        with self._lock:
            self._selector.unregister(self.socket)
            self.socket.close()
            self.sent = sys.maxsize  # nobody reads what was not sent


class Mesh:
    """Messages between the ranks of a group. Use `Mesh.of(group)`: one per group."""

    _meshes: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Mesh]"] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Mesh":
        if group not in cls._meshes:
            cls._meshes[group] = mesh = cls(group)
            weakref.finalize(group, mesh._leave, os.getpid())  # or when the process ends
        return cls._meshes[group]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world, self.group = dist.get_rank(group), dist.get_world_size(group), weakref.ref(group)
        self.changed = threading.Condition()
        self._receivers: list[weakref.ref[Any]] = []  # engines and pipelines
        self._early: defaultdict[int, list[tuple[int, str, tuple[Any, ...]]]] = defaultdict(list)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, _Line] = {}
        if self.world > 1:
            for peer, sock in _connect(_get_process_group_store(group), self.rank, self.world):
                self._lines[peer] = _Line(sock, self._selector, self._messages(peer))
            threading.Thread(target=self._serve, name="retrograde-service", daemon=True).start()

    @property
    def peers(self) -> Iterator[int]:
        """The other ranks, nearest first, so that not everybody asks rank 0 at once."""
        return ((self.rank + step) % self.world for step in range(1, self.world))

    def attach(self, receiver: Any) -> None:
        """Number a receiver and deliver what came before it was there. They are created in one order on all ranks, so
        the number is shared. Its `room` says where tensors belong, `on_message` and `on_lost` tell it (station.py).

        Held weakly: messages for one that is gone are dropped, and its number is not given out again.
        """
        with self.changed:
            receiver.number = len(self._receivers)
            self._receivers.append(weakref.ref(receiver))
            for src, op, args in self._early.pop(receiver.number, []):
                receiver.on_message(src, op, args)

    # ---- sending
    def send(self, dst: int, *message: Any, data: Sequence[torch.Tensor] = ()) -> int:
        """Send `(op, engine, *args)` and tensors to another rank's service thread. Give what it returns to `sent`."""
        head = pickle.dumps(message)
        parts = [_bytes_of(tensor) for tensor in data if tensor.numel()]
        first = _HEAD.pack(len(head), sum(map(len, parts))) + head
        return self._lines[dst].send([memoryview(first), *parts])

    def sent(self, dst: int, mark: int) -> bool:
        """May the tensors of that message change again?"""
        return self._lines[dst].sent >= mark

    # ---- the service thread
    def _serve(self) -> None:
        peers = {line: peer for peer, line in self._lines.items()}
        while self._selector.get_map():
            for key, ready in self._selector.select():
                line: _Line = key.data
                try:
                    if ready & selectors.EVENT_WRITE:
                        line.send()
                        with self.changed:
                            self.changed.notify_all()  # somebody may wait for this to be sent
                    if ready & selectors.EVENT_READ:
                        line.receive()
                except Exception as error:  # whatever it is: those who wait are told
                    line.close()
                    self._lost(f"the connection to rank {peers[line]} was lost, {GONE}", error)

    def _messages(self, src: int) -> Iterator[memoryview]:
        """Memory to be filled with what comes from `src`, piece by piece; complete messages are delivered."""
        head = bytearray(_HEAD.size)
        while True:
            yield memoryview(head)
            size, extra = _HEAD.unpack(head)
            body = bytearray(size)
            yield memoryview(body)
            op, number, *args = pickle.loads(body)
            data: list[torch.Tensor] = []
            if extra:
                receiver = self._receivers[number]() if number < len(self._receivers) else None
                data += [] if receiver is None else receiver.room(op, args, extra)
                data = data or [torch.empty(extra, dtype=torch.uint8)]  # nobody wants it any more
                del receiver
            yield from [_bytes_of(tensor) for tensor in data if tensor.numel()]
            with self.changed:
                self._deliver(number, src, op, (*args, *data))
                del body, args, data  # nothing is kept: who waits for it may count references to a page

    def _deliver(self, number: int, src: int, op: str, args: tuple[Any, ...]) -> None:
        if number >= len(self._receivers):
            self._early[number].append((src, op, args))
        elif (receiver := self._receivers[number]()) is not None:
            receiver.on_message(src, op, args)
        elif op in ("read", "meet", "ask"):  # what needs an answer
            self.send(src, "fail", number, f"rank {self.rank} has let go of this model, which rank {src} needs; {WAIT}")

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


def _connect(store: Store, rank: int, world: int) -> Iterator[tuple[int, socket.socket]]:
    """A connection to every other rank; they tell their addresses and secrets in the group's store."""
    secret, patience = secrets.token_bytes(16), store.timeout.total_seconds()  # type: ignore[attr-defined]
    store.set(f"retrograde/host/{rank}", _host())
    together = len({store.get(f"retrograde/host/{peer}") for peer in range(world)}) == 1
    with _listen(store, together, world) as server:
        server.settimeout(patience)
        store.set(f"retrograde/{rank}", pickle.dumps((server.getsockname(), secret)))  # type: ignore[arg-type]
        for peer in range(rank):
            address, theirs = pickle.loads(store.get(f"retrograde/{peer}"))
            called = socket.socket(server.family)
            called.settimeout(patience)
            called.connect(address if together else address[:2])
            called.sendall(_HELLO.pack(theirs, rank))
            yield peer, called
        missing = world - rank - 1
        while missing:
            caller, _ = server.accept()
            caller.settimeout(patience)
            given, peer = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL).ljust(_HELLO.size))
            if secrets.compare_digest(given, secret):
                missing -= 1
                yield peer, caller
            else:
                caller.close()


def _host() -> str:
    """The same for ranks that reach each other without a network: on one kernel, in one network namespace (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        return secrets.token_hex()


def _listen(store: Store, together: bool, world: int) -> socket.socket:
    """Where others call: a name without a file, or the address from which this host reaches the group's store."""
    if together:
        server = socket.socket(socket.AF_UNIX)
        server.bind("")  # the kernel finds a name
        server.listen(world)
        return server
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, TCPStore) else "localhost"
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return socket.create_server((probe.getsockname()[0], 0), family=family, backlog=world)
