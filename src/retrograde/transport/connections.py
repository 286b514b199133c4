"""The ranks of one process group, with a service thread on each.

[Note: one-sided communication]
A collective needs every rank to call it, in one order. A free-form backward does not give that: a rank may
skip a unit, use another one, run an evaluation of its own or do one backward more. So nothing on the data
path here is a collective. A rank that wants a page *reads* the other ranks' shards, a rank that has a
gradient *puts* each owner's part there, and the other side is a small service thread that answers whatever
its main thread is doing. Messages carry unit and sequence, so data of two units cannot mix, and no order
has to be shared. Ranks *meet* (one_sided.py) only where they must agree: at the end of a backward, at a step.

torch.distributed brings the ranks together (connecting.py); from then on they talk by wires of their own (wires.py).
(gloo's point to point operations must be posted on both sides, cannot be polled, spend a fifth of a millisecond on a
small message and close the connection when one of them times out.) What comes from a rank is put together and delivered
in the order in which it was sent (arrivals.py); who is still there, and what went wrong first, is liveness.py's.

Rule 1: nobody waits for another rank in order to send. So the service threads always receive.
Rule 2: a thread that sends does not ask for `changed` while it does.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from retrograde.torch_internals import store_of
from retrograde.transport import leaving
from retrograde.transport.arrivals import Arrivals, take_whole
from retrograde.transport.connecting import connect
from retrograde.transport.envelope import opened, pieces
from retrograde.transport.liveness import GONE, Cause, Liveness
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
    Ordered,
    Read,
    Share,
    ToRank,
    ToReceiver,
)
from retrograde.transport.wires import Came, Lost, Sending, Wires

KEEP = "keep the model until all ranks have read it: delete it after a dist.barrier(), or leave it to the program's end"
TIMEOUT = 60.0  # seconds
_LONGEST_PAUSE = 0.01  # seconds between two looks, however crowded the host is
_FLUSH = 1.0  # seconds in which a rank that leaves says its last words
_CLOSED = 2.0  # seconds after which a connection that takes nothing more is known to be lost
_EARLY = 4096  # messages for engines and pipelines that this rank has not made yet
_LETTERS = 0.5  # seconds after which letters that nobody has taken are looked at


class Receiver(Protocol):
    """An engine's or a pipeline's end of the connections.

    The service thread calls it, with `Connections.changed` held if not said otherwise."""

    number: int  # given by the connections: the same on all ranks
    timeout: float  # seconds for which a rank that has finished waits for others that ask for nothing

    def destination(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong; None if nobody wants them any more. Called without `changed`."""

    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None: ...

    def on_lost(self, cause: str, error: Exception) -> None:
        """Note that something has gone wrong with a rank: whoever waits does so in vain. Called once."""

    def unsaid(self) -> str | None:
        """What has gone wrong, if the main thread has not been told by an exception."""


class Connections:
    """Messages between the ranks of a group. Use `Connections.of(group)`: made once for each group."""

    _by_group: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Connections]"] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float = TIMEOUT) -> "Connections":
        """The group's connections, made at the first call: all ranks must come to it within `timeout` seconds."""
        if group not in cls._by_group:
            rank, world = dist.get_rank(group), dist.get_world_size(group)
            wires = connect(store_of(group), rank, world, timeout) if world > 1 else None
            neighbours = neighbours_of(rank, world) if wires is not None and not wires.spans_hosts else None
            cls._by_group[group] = made = cls(rank, world, wires, group, neighbours)
            weakref.finalize(group, made.say_goodbye).atexit = False  # leaving.py has the end of the process
            if wires is not None:
                leaving.watch(made, cls._by_group.get)
        return cls._by_group[group]

    def __init__(
        self,
        rank: int,
        world: int,
        wires: Wires | None,
        group: dist.ProcessGroup | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`wires`: None if this rank is alone."""
        self.rank = rank
        self.world = world
        self.wires = wires
        self.neighbours = neighbours  # where all ranks are on one host
        self._sleepers = 0  # threads of this rank that wait for letters
        self._group = None if group is None else weakref.ref(group)
        self._in_job = range(world) if group is None else dist.get_process_group_ranks(group)
        self.changed = threading.Condition()
        self._receivers: list[weakref.ref[Receiver]] = []  # engines and pipelines
        self._early: defaultdict[int, list[tuple[int, ToReceiver]]] = defaultdict(list)
        self.process = os.getpid()
        self._liveness = Liveness(self.peers)
        self._refused: set[int] = set()  # ranks that sent what could not be taken
        self._arrivals = {peer: Arrivals(peer, self) for peer in self.peers}
        self._crowded: set[int] = set()  # ranks whose bytes have come before their messages
        self._leaving = False  # this rank has finished, or failed
        self._said_goodbye = False
        self._gives_up = False  # it waits no longer
        self._heard_at = time.monotonic()  # when somebody last said something
        self._ended = wires is None  # all connections are closed
        if wires is not None:
            threading.Thread(target=self._serve, args=(wires,), name="retrograde-service", daemon=True).start()
        if neighbours is not None:
            for peer in self.peers:
                self.tell(peer, neighbours.arena.share())

    def group(self) -> dist.ProcessGroup | None:
        return None if self._group is None else self._group()

    def name_of(self, rank: int) -> str:
        """A rank in words. A group counts its own ranks, people know those of the job: both, where they differ."""
        in_job = self._in_job[rank]
        return f"rank {rank}" if in_job == rank else f"rank {rank} (rank {in_job} of the job)"

    def names_of(self, ranks: Sequence[int]) -> str:
        """Several ranks in words."""
        own, in_job = (", ".join(map(str, each)) for each in (ranks, [self._in_job[rank] for rank in ranks]))
        return f"rank(s) {own}" if in_job == own else f"rank(s) {own} ({in_job} of the job)"

    @property
    def spans_hosts(self) -> bool:
        """Are ranks on several hosts, as far as any of them can tell? The same on all ranks."""
        return self.wires is not None and self.wires.spans_hosts

    @property
    def peers(self) -> Iterator[int]:
        """The other ranks, nearest first, so that not everybody asks rank 0 at once."""
        return ((self.rank + step) % self.world for step in range(1, self.world))

    @property
    def departed(self) -> set[int]:
        """Ranks that have said goodbye."""
        return self._liveness.departed

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
            cause = self._liveness.cause
            if cause is not None:
                receiver.on_lost(cause.text, cause.error)

    # ---- sending
    def send(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> Sending:
        """Send a message and its tensors to another rank's service thread. Raises OSError if it cannot be reached."""
        assert self.wires is not None, "this rank is alone"
        return self.wires.send(dst, message, data)

    def tell(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> None:
        """Send what needs no answer. If the other side is gone, the service thread notices."""
        with contextlib.suppress(OSError):
            self.send(dst, message, data)

    def listen_to(self, src: int) -> None:
        """Note that something is to come from a rank, so that it is noticed if that rank ends before."""
        if self.wires is not None and src != self.rank:
            self.wires.call(src)

    def post(self, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> bool:
        """Leave a letter for another rank's main thread. Returns whether it has a box on this host, and room in it."""
        neighbour = None if self.neighbours is None else self.neighbours.found.get(dst)
        return neighbour is not None and neighbour.outbox.post(pieces(message, data))

    def why_lost(self, dst: int) -> str:
        """Why nothing can be sent to a rank: it closed the connection, and has perhaps said why before that."""
        with self.changed:
            self.changed.wait_for(lambda: self._liveness.cause is not None or self._ended, _CLOSED)
            if self._liveness.cause is not None:
                return self._liveness.cause.text
            if self._ended:
                return (
                    "all ranks have left this process group (dist.destroy_process_group(), or the end of the program), "
                    "so other ranks' shards cannot be read any more"
                )
            return f"{self.name_of(dst)} cannot be reached, {GONE}"

    # ---- waiting
    def notify(self) -> None:
        """Wake whoever waits for a change. `changed` is held."""
        self.changed.notify_all()
        if self.neighbours is not None and self._sleepers:
            self.neighbours.mailbox.ring()

    def wait_until(self, over: Callable[[], bool], timeout: float, look_again: float | None = None) -> None:
        """Wait, with `changed` held once, until `over()` or for `timeout` seconds.

        `look_again`: seconds after which something may have changed that nobody tells, as that a call of a backend is
        done."""
        end = time.monotonic() + timeout
        pause = timeout if look_again is None else self._between_looks(look_again)
        if self.neighbours is None:
            while not over() and (left := end - time.monotonic()) > 0:
                self.changed.wait(min(left, pause))
            return
        mailbox = self.neighbours.mailbox
        while True:
            heard = mailbox.heard  # before anything is looked at: what changes after that rings again
            self.take_letters()
            if over() or (left := end - time.monotonic()) <= 0:
                break
            self._sleepers += 1
            self.changed.release()
            try:
                mailbox.sleep(heard, min(left, pause))
            finally:
                self.changed.acquire()
                self._sleepers -= 1
        self.take_letters()  # of a rank that has said goodbye since

    def _between_looks(self, seconds: float) -> float:
        """Seconds between two looks: more where ranks of this host are more than its cores, since looking takes time
        in which others could bring what is waited for."""
        ranks_here = 1 if self.spans_hosts else self.world  # over several hosts, ranks have cores as a rule
        crowding = max(1.0, ranks_here / (os.cpu_count() or 1))
        return max(seconds, min(seconds * crowding, _LONGEST_PAUSE))

    def take_letters(self) -> None:
        """Deliver the letters that other ranks' main threads have left for this one's.
        The service thread does so too, now and then."""
        if self.neighbours is None:
            return
        with self.changed:
            for src, letters in self.neighbours.mailbox.letters():
                if src in self._refused:
                    continue
                try:
                    for letter in letters:
                        came = opened(memoryview(letter))
                        if isinstance(came.message, ToRank):
                            raise MessageError(f"a {type(came.message).__name__} in a letter")
                        take_whole(src, came, self)
                except Exception as error:  # whatever it is: those who wait are told
                    self._refuse(src, error)

    # ---- leaving (leaving.py)
    def say_goodbye(self) -> None:
        """Have the service thread say goodbye: this is called by the garbage collector too, whatever locks are held."""
        if os.getpid() != self.process:
            return  # forked: the connections are its parent's
        if self._ended:
            leaving.forget(self)
        else:
            self._leaving = True
            if self.wires is not None:
                self.wires.ring()

    def wait_for_goodbyes(self) -> str | None:
        kept = [reference() for reference in self._receivers]  # models that nobody but readers needs any more
        with self.changed:
            patience = max((receiver.timeout for receiver in kept if receiver is not None), default=TIMEOUT)
            self._heard_at = time.monotonic()
            while not self._ended and (left := self._heard_at + patience - time.monotonic()) > 0:
                self.changed.wait(left)
            if self._ended:
                return None
            missing = sorted(self._liveness.present - self.departed)
        self._give_up()
        return (
            f"{self.name_of(self.rank)} has finished and waited {patience:g} s for {self.names_of(missing)}, "
            f"which neither finished nor asked for anything; it leaves now. A rank that goes on needs the others: "
            f"raise shard(timeout=...)"
        )

    def abandon(self, why: str) -> None:
        self._decide(Cause(self.rank, why, ConnectionError("this rank has failed")))
        self._give_up()

    def _give_up(self) -> None:
        self._gives_up = True
        self.say_goodbye()
        with self.changed:
            self.changed.wait_for(lambda: self._ended, 2 * _FLUSH)

    def unsaid(self) -> list[str]:
        receivers = [reference() for reference in self._receivers]
        texts = [receiver.unsaid() for receiver in receivers if receiver is not None]
        return list(dict.fromkeys(text for text in texts if text is not None))

    # ---- the service thread
    def _serve(self, wires: Wires) -> None:
        while self._liveness.present or self._liveness.in_doubt:
            self._attend(wires, self._patience())
            if self._liveness.in_doubt and self._patience() == 0.0:
                self._attend(wires, 0.0)  # has anybody said more in the meantime?
                self._blame()
            self.take_letters()  # for an engine that is gone, its main thread takes none
            if self._leaving:
                self._leave()
        wires.close(_FLUSH)
        if self._leaving:
            leaving.forget(self)
        with self.changed:
            self._ended = True
            self.notify()

    def _patience(self) -> float | None:
        """Seconds until there is something to do even if nothing comes."""
        with self.changed:
            if self._liveness.in_doubt:
                return self._liveness.seconds_in_doubt()
        return None if self.neighbours is None else _LETTERS

    def _attend(self, wires: Wires, patience: float | None) -> None:
        for event in wires.wait(patience, bulk=not self._crowded):
            match event:
                case Lost():
                    self._lose(event.peer)
                case Came() if event.src not in self._refused:  # also the last words of a rank that is lost
                    wires.call(event.src)  # also whom this rank has nothing to say to may end
                    self._take(event)

    def _take(self, came: Came) -> None:
        arrivals = self._arrivals[came.src]
        try:
            if came.bulk:
                arrivals.take_chunk(came.data)
            else:
                arrivals.take_message(came.data)
        except Exception as error:  # whatever it is: those who wait are told
            self._refuse(came.src, error)
        if arrivals.crowded:
            self._crowded.add(came.src)
        else:
            self._crowded.discard(came.src)

    def _leave(self) -> None:
        """Say goodbye, and close all connections when everybody has said it."""
        if not self._said_goodbye and self._liveness.cause is None:
            self._said_goodbye = True
            if self.neighbours is not None:
                self.neighbours.mailbox.finish()
            for peer in self.peers:
                self.tell(peer, Goodbye())
        with self.changed:
            self._liveness.trust_the_departed()
            if self._gives_up or self._liveness.needed_by_nobody:
                self._liveness.present.clear()

    # ---- what goes wrong
    def _lose(self, peer: int) -> None:
        with self.changed:
            if peer in self._liveness.present:
                self._liveness.lose(peer)
                self.notify()

    def _blame(self) -> None:
        """Blame the connection that was lost first: nobody has said anything about it, so it is what went wrong."""
        with self.changed:
            if not self._liveness.in_doubt:
                return
            peer, error = (
                self._liveness.oldest_doubt(),
                ConnectionResetError("the other side has closed the connection"),
            )
            if peer not in self.departed:
                self._decide(Cause(peer, f"the connection to {self.name_of(peer)} was lost, {GONE}", error))
            elif not self._leaving:
                text = f"{self.name_of(peer)} had finished and waited as long as its time-out says; raise timeout=..."
                self._decide(Cause(peer, text, error), tell=False)

    def _refuse(self, src: int, error: Exception) -> None:
        """Close the connection to a rank from which something came that cannot be taken, and tell all ranks why."""
        why = f"could not take what came from there: {type(error).__name__}: {error}"
        text = f"the connection to {self.name_of(src)} was closed by {self.name_of(self.rank)}, which {why}"
        self._decide(Cause(src, text, error))  # which tells the other side too
        self._refused.add(src)
        self._arrivals[src] = Arrivals(src, self)  # what was half received is forgotten
        with self.changed:
            self._liveness.present.discard(src)
        assert self.wires is not None
        self.wires.hang_up(src)

    def _decide(self, cause: Cause, tell: bool = True) -> None:
        """Take this for what went wrong first, unless something else is known already.
        All receivers are told, and if `tell` all ranks."""
        with self.changed:
            if not self._liveness.accept(cause):
                return
            if tell:  # before the main thread can leave because of it
                for peer in self.peers:
                    self.tell(peer, FirstCause(cause.rank, cause.text))
            for reference in self._receivers:
                if (receiver := reference()) is not None:
                    receiver.on_lost(cause.text, cause.error)
            self.notify()

    # ---- what comes: implements `Reader` for arrivals.py
    def destination(self, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
        if isinstance(message, ToRank):
            found: Sequence[torch.Tensor] | None = ()
        elif message.receiver >= len(self._receivers):
            if nbytes:
                raise MessageError(f"{nbytes} bytes of tensors for receiver {message.receiver}, which is not there yet")
            found = ()
        else:
            receiver = self._receivers[message.receiver]()
            found = None if receiver is None else receiver.destination(src, message, nbytes)
        if found is not None and (expected := sum(tensor.nbytes for tensor in found)) != nbytes:
            raise MessageError(f"{nbytes} bytes of tensors with a {type(message).__name__} that takes {expected}")
        return found

    def deliver(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None:
        match message:
            case FirstCause():
                error = ConnectionError(f"told by rank {src}")
                self._decide(Cause(message.rank, message.text, error), tell=False)
            case Goodbye():
                self.departed.add(src)
                self.notify()  # somebody may wait for that rank's main thread
            case Share() | Mapped():
                self._meet_neighbour(src, message)
            case _:
                self._hand_on(src, message, data)

    def _meet_neighbour(self, src: int, message: Share | Mapped) -> None:
        if self.neighbours is None:
            return  # this rank could not make shared memory, and the other is told nothing
        if isinstance(message, Mapped):
            self.neighbours.found_by.add(src)
        elif self.neighbours.find(src, message):
            self.tell(src, Mapped())

    def _hand_on(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        self._heard_at = time.monotonic()
        if message.receiver >= len(self._receivers):
            if sum(map(len, self._early.values())) >= _EARLY:
                raise MessageError(f"more than {_EARLY} messages for engines that this rank has not made")
            self._early[message.receiver].append((src, message))
        elif (receiver := self._receivers[message.receiver]()) is not None:
            receiver.on_message(src, message, data)
        elif isinstance(message, Read | Meet | Ask) or (isinstance(message, Ordered) and message.needs_answer):
            text = f"rank {self.rank} has let go of this model, which rank {src} needs; {KEEP}"
            self.tell(src, Fail(message.receiver, text))
