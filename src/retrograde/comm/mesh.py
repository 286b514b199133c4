"""The ranks of one process group, with a service thread on each.

[Note: one-sided communication]
A collective needs every rank to call it, in one order. A free-form backward does not give that: a rank may
skip a unit, use another one, run an evaluation of its own or do one backward more. So nothing on the data
path here is a collective. A rank that wants a page *reads* the other ranks' shards, a rank that has a
gradient *puts* each owner's part there, and the other side is a small service thread that answers whatever
its main thread is doing. Messages carry unit and sequence, so data of two units cannot mix, and no order
has to be shared. Ranks *meet* (station.py) only where they must agree: at the end of a backward, at a step.

Rule 1: the service thread never blocks on another rank. It posts sends and receives and goes on.
Rule 2: control messages are small and go through the one blocking receive of the service thread; the main
        thread waits for them on a condition with a deadline, because a time-out inside gloo closes the pair.
Rule 3: a work is waited for exactly once (gloo rewrites the output on a second wait).
"""

import atexit
import contextlib
import pickle
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from retrograde.comm.station import Station

FRAME = 4096  # bytes of a control message that travel in one piece
CONTROL, REST, FIRST_DATA = 1, 2, 16
TAGS = 2**30
FOREVER = timedelta(days=365)
PENDING_SENDS = 256


def keep_sending(works: deque[Any], work: Any) -> None:
    """Hold a send: one that is dropped before it is done is lost. Hundreds of messages later it is done."""
    works.append(work)
    if len(works) > PENDING_SENDS:
        works.popleft().wait()


GONE = "so a process ended or gave up; its own output says why"


class Mesh:
    """Point-to-point messages between the ranks of a group. Use `Mesh.of(group)`: one per group."""

    _meshes: ClassVar[dict[dist.ProcessGroup, "Mesh"]] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Mesh":
        if group not in cls._meshes:
            cls._meshes[group] = cls(group)
        return cls._meshes[group]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.changed = threading.Condition()
        self._receivers: list[weakref.ref[Station]] = []
        self._early: defaultdict[int, list[tuple[int, str, tuple[Any, ...]]]] = defaultdict(list)
        self._sent: deque[Any] = deque()
        self._tag = FIRST_DATA
        self._closing = False
        ranks = dist.get_process_group_ranks(group)
        self.group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=FOREVER, backend="gloo", use_local_synchronization=True
        )
        self._thread = threading.Thread(target=self._serve, name="retrograde-service", daemon=True)
        if self.world > 1:
            self._thread.start()
            atexit.register(self.close)

    @property
    def peers(self) -> Iterator[int]:
        """The other ranks, nearest first, so that not everybody asks rank 0 at once."""
        return ((self.rank + step) % self.world for step in range(1, self.world))

    def attach(self, receiver: "Station") -> None:
        """Number an engine and deliver what came before it was there. Engines are created in one order on all ranks,
        so the number is shared.

        Held weakly: messages for an engine that is gone are dropped, and its number is not given out again.
        """
        with self.changed:
            receiver.number = len(self._receivers)
            self._receivers.append(weakref.ref(receiver))
            for src, op, args in self._early.pop(receiver.number, []):
                receiver.on_message(src, op, args)

    # ---- control
    def send(self, dst: int, *message: Any) -> None:
        """Post `(op, engine, *args)` to another rank's service thread; never blocks on that rank."""
        data = pickle.dumps(message)
        head = bytearray(len(data).to_bytes(8, "little") + data)
        frame = torch.frombuffer(head[:FRAME], dtype=torch.uint8)  # gloo lets a receive be larger than its send
        with self.changed:
            keep_sending(self._sent, self.group.send([frame], dst, CONTROL))
            if len(head) > FRAME:
                rest = torch.frombuffer(head[FRAME:], dtype=torch.uint8)
                keep_sending(self._sent, self.group.send([rest], dst, REST))

    def _receive(self) -> tuple[int, tuple[Any, ...]]:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        work = self.group.recv_anysource([frame], CONTROL)
        work.wait()
        src = work._source_rank()
        raw = bytes(frame.numpy())
        size = int.from_bytes(raw[:8], "little")
        data = raw[8 : 8 + size]
        if size + 8 > FRAME:
            rest = torch.empty(size + 8 - FRAME, dtype=torch.uint8)
            self.group.recv([rest], src, REST).wait()
            data += bytes(rest.numpy())
        return src, pickle.loads(data)

    # ---- data
    def next_tag(self, mine: bool) -> int:
        """A tag for one transfer. Both ends of a pair number transfers on their own: the one that will send uses
        odd tags, the one that will receive even ones, so that two transfers in one direction never share a tag.
        """
        with self.changed:
            self._tag = self._tag + 2 if self._tag < TAGS else FIRST_DATA
            return self._tag + mine

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        return dist.isend(tensor, group_dst=dst, group=self.group, tag=tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        return dist.irecv(tensor, group_src=src, group=self.group, tag=tag)

    # ---- the service thread
    def _serve(self) -> None:
        try:
            while self._handle(*self._receive()):
                pass
        except Exception as error:
            if not self._closing:
                self._lost(f"the connection between ranks was lost, {GONE}", error)

    def _handle(self, src: int, message: tuple[Any, ...]) -> bool:
        """One message; in a call of its own, so that nothing of it is kept while waiting for the next."""
        op, number, *args = message
        if op == "bye":
            self.send(src, "stop", -1)
        elif op != "stop":
            with self.changed:
                self._deliver(number, src, op, tuple(args))
        return bool(op != "stop")

    def _deliver(self, number: int, src: int, op: str, args: tuple[Any, ...]) -> None:
        if number >= len(self._receivers):
            self._early[number].append((src, op, args))
        elif (receiver := self._receivers[number]()) is not None:
            receiver.on_message(src, op, args)
        elif op == "read":
            self.send(src, "notice", number, args[-1], "it has let go of this model")

    def _lost(self, cause: str, error: Exception) -> None:
        with self.changed:
            for reference in self._receivers:
                if (receiver := reference()) is not None:
                    receiver.on_lost(cause, error)
            self.changed.notify_all()

    def close(self) -> None:
        """Leave: ask one peer to release our service thread. Needs no one else to leave at the same time."""
        if self._closing or not self._thread.is_alive():
            return
        self._closing = True
        for peer in self.peers:
            # A peer that is gone already closes the connection, which ends the thread as well.
            with contextlib.suppress(RuntimeError):
                self.send(peer, "bye", -1)
                self._thread.join(timeout=5)
            if not self._thread.is_alive():
                return

