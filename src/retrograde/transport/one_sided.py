"""The transport between processes: one engine's end of the connections (connections.py).

A *meeting* is the only point at which ranks wait for each other's main thread. Every rank brings its
position (why it came and what it has to offer) and leaves with everybody's, so all ranks see the same
sequence of meetings and can draw the same conclusions from it. Many ranks pass on what they have heard
(rounds.py), so that messages grow as the logarithm of their number. That replaces an agreed order of
collectives: positions need not be equal, they only have to be reconcilable (coordination/coordinator.py).

Everything else is served by the other rank's service thread, whatever its main thread is doing.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, cast

import torch

from retrograde.devices import Stream
from retrograde.errors import DivergenceError
from retrograde.transport.connections import Connections
from retrograde.transport.messages import (
    Ask,
    Fail,
    Key,
    Meet,
    MessageError,
    Ordered,
    PackedPosition,
    Put,
    Read,
    Reason,
    ShardData,
    Stamp,
    Tell,
    ToReceiver,
    pack,
    tensor_forms,
    unpack,
)
from retrograde.transport.protocol import Memory, Position, ShardServer, Work
from retrograde.transport.rounds import Round, rounds
from retrograde.transport.wires import Sending

_AT_ONCE = 256  # positions in a message, whose length is limited (envelope.py)
_LOOK_AGAIN = 0.002  # seconds between two looks at whether a gradient has been sent
UNTIL_HEARD = 2.0  # seconds after which a rank that has gone is known to have gone


class _Request(NamedTuple):
    """A reader that waits until this rank's shard is in the state it needs."""

    reader: int
    unit: int
    stamp: Stamp


class _Brought(NamedTuple):
    """A rank's position at a meeting, as it travels, with the tensors of its value."""

    position: PackedPosition
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _RankWork:
    """Something that other ranks do. It is done when none of them is missing any more."""

    transport: "OneSidedTransport"
    missing: Callable[[], list[int]]
    what: str
    look_again: float | None = None  # seconds, where nobody tells that it is done

    def wait(self, stream: Stream) -> None:
        """Wait until no rank is missing.
        Memory is the host's, so nothing is left to be ordered on a stream when the bytes are there."""
        self.transport.wait_for(self.missing, self.what, look_again=self.look_again)

    def done(self) -> bool:
        return not self.missing()


class OneSidedTransport:
    """Reads, puts and meetings over connections. Implements `Transport`, and `Receiver` for the connections."""

    number: int  # given by the connections: the same on all ranks

    def __init__(self, connections: Connections, shards: ShardServer, timeout: float) -> None:
        self.connections = connections
        self.rank = connections.rank
        self.world = connections.world
        self.timeout = timeout
        self.meetings = 0
        self.failure: str | None = None
        self._shards = shards
        self._where: Callable[[], str] = lambda: "not started"  # what this rank's main thread is doing
        self._told: dict[int, str] = {}  # where others say they are, when something is amiss
        self._rounds = rounds(self.rank, self.world)
        self._to_hear = {words.rank: words.number for each in self._rounds for words in each.hears}
        self._met: dict[int, dict[int, list[_Brought]]] = {}  # by meeting, and by the rank that told it
        self._requests: list[_Request] = []
        self._reading: dict[tuple[int, int], torch.Tensor] = {}  # unit, owner: where its shard belongs
        self._parts: dict[tuple[Key, int], torch.Tensor] = {}
        self._lost: tuple[str, Exception] | None = None  # what went wrong with another rank
        self._said = False  # has the main thread been told, by an exception, that something is wrong?
        self._listener: weakref.WeakMethod[Callable[[int, bytes], None]] | None = None
        connections.attach(self)

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Take the stream's own memory: connections send from any."""
        return stream.empty(numel, dtype)

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        self.check()
        owners = list(into)  # of their memory nothing is kept once it has come
        for src, memory in into.items():
            self._reading[unit, src] = memory
            self._send(src, Read(self.number, unit, stamp))

        def missing() -> list[int]:
            return [src for src in owners if (unit, src) in self._reading]

        return _RankWork(self, missing, f"reading unit {name}")

    def shards_changed(self) -> None:
        if not self._requests:
            return
        with self.connections.changed:
            self._requests = [request for request in self._requests if not self._answer(request)]

    def _answer(self, request: _Request) -> bool:
        found = self._shards.shard_for(request.unit, request.stamp)
        if isinstance(found, str):
            return False
        self.connections.tell(request.reader, self._shard_data(request.unit, found), data=[found])
        return True

    def _shard_data(self, unit: int, found: torch.Tensor) -> ShardData:
        return ShardData(self.number, unit)

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        sending = {
            dst: self._send(dst, Put(self.number, key, pieces[0].dtype), data=pieces) for dst, pieces in parts.items()
        }

        def missing() -> list[int]:
            return [dst for dst, part in sending.items() if not part.done]

        return _RankWork(self, missing, "taking part of a gradient", look_again=_LOOK_AGAIN)

    def arrived(self, key: Key, src: int) -> bool:
        return (key, src) in self._parts

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        self.wait_for(lambda: [] if self.arrived(key, src) else [src], f"its gradient of unit {unit}")
        with self.connections.changed:
            return self._parts.pop((key, src))

    def discard_parts(self) -> None:
        self.discard_before(self.meetings)

    def discard_before(self, meeting: int) -> None:
        """Forget what was put before this meeting and never taken, where somebody else counts meetings."""
        with self.connections.changed:
            self._parts = {at: part for at, part in self._parts.items() if at[0].meeting >= meeting}

    # ---- the order of collectives: messages of which this transport knows nothing
    def listen(self, listener: Callable[[int, bytes], None]) -> None:
        """Have this method called with each such message, its sender and its bytes, with `changed` held, as long as the
        method's object lives."""
        self._listener = weakref.WeakMethod(listener)

    def tell_order(self, dst: int, data: bytes, needs_answer: bool) -> None:
        self.connections.tell(dst, Ordered(self.number, data, needs_answer))

    def give_up(self, text: str) -> None:
        """Tell all ranks that this engine is of no further use; whoever waits raises."""
        self._announce(text)
        self.connections.notify()

    # ---- agreement
    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        self.meetings += 1
        number = self.meetings
        what = f"{position.reason} ({position.label})"
        known = [_packed(position)]  # and then those of the ranks before this one, nearest first
        for each in self._rounds:
            self._tell_round(each, number, known)
            self._where = functools.partial(self._waiting, each, number, what)
            self.wait_for(functools.partial(self._unheard, each, number), what, for_main_threads=True)
            known += [brought for src, _ in each.hears for brought in self._met[number][src]]
        self._met.pop(number, None)
        self._where = lambda: f"outside retrograde, after {what}"
        positions = [position, *map(_unpacked, known[1:])]
        return [positions[(self.rank - rank) % self.world] for rank in range(self.world)]

    def _tell_round(self, each: Round, number: int, known: Sequence[_Brought]) -> None:
        for dst, count in each.tells:
            for start in range(0, count, _AT_ONCE):
                some = known[start : min(start + _AT_ONCE, count)]
                message = Meet(self.number, number, [brought.position for brought in some])
                self._send_positions(dst, message, [tensor for brought in some for tensor in brought.tensors])

    def _unheard(self, each: Round, number: int) -> list[int]:
        """The ranks that are to tell this one something in this round, and have not told all of it."""
        met = self._met.get(number, {})
        return [src for src, count in each.hears if len(met.get(src, ())) < count]

    def _waiting(self, each: Round, number: int, what: str) -> str:
        missing = ", ".join(map(str, self._unheard(each, number)))
        return f"waiting for rank(s) {missing} at {what}" if missing else f"at {what}"

    def tell_all(self, words: list[str]) -> list[list[str]]:
        """Meet about groups that ranks have put back (own_groups.py). Returns what each rank says."""
        positions = self.meet(Position(Reason.VALUE, "groups of our own", {}, {}, words))
        return [cast(list[str], position.value) for position in positions]

    def meeting_is_over(self) -> None:
        """Do nothing: nobody waits for that."""

    def _send_positions(self, dst: int, message: Meet, data: Sequence[torch.Tensor]) -> None:
        self._send(dst, message, data)

    def _send(self, dst: int, message: ToReceiver, data: Sequence[torch.Tensor] = ()) -> Sending:
        try:
            return self.connections.send(dst, message, data=data)
        except OSError as error:
            cause = self.connections.why_lost(dst)
            self.check()
            self._said = True
            raise DivergenceError(f"{self._own_name}: {cause}") from error

    # ---- failure
    @property
    def _own_name(self) -> str:
        return self.connections.name_of(self.rank)

    def check(self) -> None:
        if self.failure is not None:
            self._said = True
            raise DivergenceError(self.failure)

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._announce(text)
        self._said = True
        raise DivergenceError(self.failure) from cause

    def _announce(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            for peer in self.connections.peers:
                self.connections.tell(peer, Fail(self.number, failure))

    @contextlib.contextmanager
    def shared_fate(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._said = True
            if not isinstance(error, DivergenceError):
                self._announce(f"rank {self.rank}: {what} raised {type(error).__name__}: {error}")
            raise

    def wait_for(
        self,
        missing: Callable[[], list[int]],
        what: str,
        for_main_threads: bool = False,
        look_again: float | None = None,
    ) -> None:
        """Wait until no rank is missing. A rank that has said goodbye still serves; its main thread does nothing more.

        `for_main_threads`: the wait fails if a missing rank has said goodbye. `look_again`: seconds after which
        something may have changed that nobody tells."""

        def finished() -> list[int]:
            return [peer for peer in missing() if peer in self.connections.departed] if for_main_threads else []

        def over() -> bool:
            return not missing() or self.failure is not None or self._lost is not None or bool(finished())

        with self.connections.changed:
            self.connections.wait_until(over, self.timeout, look_again)
            self.check()
            absent = missing()
            if not absent:
                return  # also where a rank has left since: it had nothing more to bring
            self._fail_if_gone(finished(), what)
            for peer in absent:
                self.connections.tell(peer, Ask(self.number))
            self.connections.wait_until(lambda: all(peer in self._told for peer in absent), 1.0)
        places = "; ".join(
            f"{self.connections.name_of(peer)} is {self._told.get(peer, 'not answering')}" for peer in absent
        )
        self.fail(
            f"{self._own_name} waited {self.timeout:g} s for {self.connections.names_of(absent)} "
            f"at {what}, but {places}. Let every rank come to the same steps (they may skip units, "
            f"reorder them or do fewer backwards), or raise shard(timeout=...)"
        )

    def fail_of_backend(self, what: str, error: Exception) -> NoReturn:
        """Fail, since a call of the process group's backend failed. Mostly a rank has gone: that is heard a little
        later, and named then."""
        with self.connections.changed:
            self.connections.wait_until(lambda: self.failure is not None or self._lost is not None, UNTIL_HEARD)
            self.check()
            self._fail_if_gone([], what)
        self.fail(f"{self._own_name}: {what} failed in the backend of torch.distributed: {error}", error)

    def _fail_if_gone(self, finished: list[int], what: str) -> None:
        """Fail if the missing ranks will not come: they have finished, or a rank has been lost."""
        if finished:
            self.fail(
                f"{self._own_name} is at {what} and needs {self.connections.names_of(finished)}, which "
                f"finished: their programs have ended, or called dist.destroy_process_group(). Let every rank "
                f"come to the same steps, also one that has no more data: it may step without a backward"
            )
        if self._lost is not None:
            self._said = True
            raise DivergenceError(f"{self._own_name}: {self._lost[0]}") from self._lost[1]

    # ---- the service thread's side, which holds `changed`
    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        match message:
            case Read():
                self._serve(_Request(src, message.unit, message.stamp))
                return  # the main thread does not wait for that
            case ShardData():
                self._reading.pop((message.unit, src), None)
            case Put():
                self._parts[message.key, src] = data[0]
            case Meet():
                self._hear_positions(src, message, data)
            case Ordered():
                self._hear_order(src, message)
            case _:
                self._on_trouble(src, message)
        self.connections.notify()

    def _hear_positions(self, src: int, message: Meet, data: Sequence[torch.Tensor]) -> None:
        heard = self._met.setdefault(message.number, {}).setdefault(src, [])
        tensors = iter(data)
        for position in message.positions:
            heard.append(_Brought(position, [next(tensors) for _ in tensor_forms(position.value)]))
        if len(heard) > self._to_hear.get(src, 0):
            raise MessageError(f"{len(heard)} positions at a meeting, where it tells {self._to_hear.get(src, 0)}")

    def _hear_order(self, src: int, message: Ordered) -> None:
        if self._listener is None:
            raise MessageError("a message about an order of collectives, which this engine does not have")
        listener = self._listener()
        if listener is not None:
            listener(src, message.data)

    def _serve(self, request: _Request) -> None:
        """Answer a reader now, or when shards change. Its request is noted before it is looked at: the main thread
        looks at what is noted when it has changed something."""
        self._requests.append(request)
        if self._answer(request):
            self._requests.remove(request)

    def _on_trouble(self, src: int, message: ToReceiver) -> None:
        match message:
            case Ask():
                self._tell(src)
            case Tell():
                self._told[src] = message.where
            case Fail():
                self.failure = self.failure or message.text
            case _:
                raise MessageError(f"a {type(message).__name__} was sent to an engine")

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)

    def unsaid(self) -> str | None:
        if self._said:
            return None
        if self.failure is not None:
            return self.failure
        return None if self._lost is None else self._lost[0]

    def _tell(self, src: int) -> None:
        answers = [self._shards.shard_for(unit, stamp) for reader, unit, stamp in self._requests if reader == src]
        reasons = {answer for answer in answers if isinstance(answer, str)}
        self.connections.tell(src, Tell(self.number, "; ".join([self._where(), *reasons])))

    # ---- the service thread's side, which does not hold it
    def destination(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong; None: nobody wants them any more."""
        match message:
            case ShardData():
                waiting = self._reading.get((message.unit, src))
                return None if waiting is None else [waiting]
            case Put():
                return [torch.empty(self._shards.shard_numel(message.key.unit), dtype=message.dtype, device="cpu")]
            case Meet():
                forms = [form for position in message.positions for form in tensor_forms(position.value)]
                expected = sum(form.nbytes for form in forms)
                if expected != nbytes:  # before memory is taken
                    raise MessageError(f"{nbytes} bytes of tensors with a meeting's value that has {expected}")
                return [form.empty() for form in forms]
            case _:
                return ()


def _packed(position: Position) -> _Brought:
    value, tensors = pack(position.value)
    return _Brought(PackedPosition(position.reason, position.label, position.sent, position.pending, value), tensors)


def _unpacked(brought: _Brought) -> Position:
    packed = brought.position
    value = unpack(packed.value, brought.tensors)
    return Position(packed.reason, packed.label, packed.sent, packed.pending, value)
