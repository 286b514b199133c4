"""Ranks that are threads of one process: for tests that need ranks and no processes.

All memory is shared, so a rank reads another's shard from where it lies, and a part of a gradient is handed over as a
copy. What ranks share is one `_Shared`, under one lock.
"""

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch

from retrograde.devices import Stream, Streams
from retrograde.errors import DivergenceError, PipelineError
from retrograde.transport.messages import Address, Key, Stamp
from retrograde.transport.protocol import Memory, Parts, Position, ShardServer, Way, Work
from retrograde.transport.tensors import copy_of

T = TypeVar("T")


@dataclass(eq=False)
class _Shared:
    """What the transports of one engine, one on each rank, have in common."""

    world: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    transports: dict[int, "ThreadTransport"] = field(default_factory=dict)
    met: dict[int, dict[int, Position]] = field(default_factory=lambda: defaultdict(dict))
    parts: dict[tuple[Key, int, int], torch.Tensor] = field(default_factory=dict)  # key, from, to
    failure: str | None = None


@dataclass(eq=False)
class _Mail:
    """What the channels of one pipeline, one on each rank, have in common: messages by address and receiver."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    arrived: dict[tuple[Address, int], deque[Parts | None]] = field(default_factory=lambda: defaultdict(deque))


class ThreadGroup:
    """Ranks that are threads, `world` of them. Each thread takes its own: `group.rank(0)`."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._engines: dict[int, _Shared] = {}  # by the order in which ranks make them
        self._pipelines: dict[int, _Mail] = {}

    def rank(self, number: int) -> "ThreadRanks":
        return ThreadRanks(self, number)

    def engine(self, number: int) -> _Shared:
        with self._lock:
            return self._engines.setdefault(number, _Shared(self.world))

    def pipeline(self, number: int) -> _Mail:
        with self._lock:
            return self._pipelines.setdefault(number, _Mail())


class ThreadRanks:
    """One thread's view of the ranks. Implements `PipelineRanks`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world = group.world
        self._group = group
        self._made = 0  # transports
        self._channels = 0

    def transport(self, shards: ShardServer, streams: Streams, timeout: float) -> "ThreadTransport":
        shared = self._group.engine(self._made)
        self._made += 1
        return ThreadTransport(shared, self.rank, shards, timeout)

    def channel(self, streams: Streams, patience: float, ways: Sequence[Way]) -> "ThreadChannel":
        mail = self._group.pipeline(self._channels)
        self._channels += 1
        return ThreadChannel(mail, self.rank, streams.device, patience)

    def say_goodbye(self) -> None:
        """Do nothing: the others read this rank's memory themselves, also when its thread has ended."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Work that is done when `finish` has been called, which need not wait once `can_finish`."""

    finish: Callable[[], None]
    can_finish: Callable[[], bool]

    def wait(self, stream: Stream) -> None:
        self.finish()

    def done(self) -> bool:
        return self.can_finish()


class ThreadTransport:
    """Implements `Transport` between threads of one process."""

    def __init__(self, shared: _Shared, rank: int, shards: ShardServer, timeout: float) -> None:
        self.rank = rank
        self.world = shared.world
        self.timeout = timeout
        self.meetings = 0
        self.shards = shards
        self._shared = shared
        with shared.changed:
            shared.transports[rank] = self
            shared.changed.notify_all()

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        return stream.empty(numel, dtype)

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        """Copy the owners' shards when they are in the state asked for: now, or when this rank waits for them."""
        self.check()
        missing = dict(into)

        def copy_those_there() -> bool:
            for src in list(missing):
                owner = self._shared.transports.get(src)
                found = "it has not made the engine" if owner is None else owner.shards.shard_for(unit, stamp)
                if not isinstance(found, str):
                    missing.pop(src).copy_(found)
            return not missing

        with self._shared.changed:
            copy_those_there()
        return _Deferred(lambda: self._wait(copy_those_there, f"reading unit {name}"), lambda: not missing)

    def shards_changed(self) -> None:
        with self._shared.changed:
            self._shared.changed.notify_all()

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        with self._shared.changed:
            for dst, pieces in parts.items():
                self._shared.parts[key, self.rank, dst] = torch.cat(list(pieces))
            self._shared.changed.notify_all()
        return _Deferred(lambda: None, lambda: True)

    def arrived(self, key: Key, src: int) -> bool:
        return (key, src, self.rank) in self._shared.parts

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        self._wait(lambda: self.arrived(key, src), f"the gradient of unit {unit} from rank {src}")
        with self._shared.changed:
            return self._shared.parts.pop((key, src, self.rank))

    def discard_parts(self) -> None:
        with self._shared.changed:
            for at in [at for at in self._shared.parts if at[2] == self.rank and at[0].meeting < self.meetings]:
                del self._shared.parts[at]

    # ---- agreement
    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        with self._shared.changed:
            self.meetings += 1
            met = self._shared.met[self.meetings]
            met[self.rank] = position
            self._shared.changed.notify_all()
        self._wait(lambda: len(met) == self.world, f"{position.reason} ({position.label})")
        with self._shared.changed:
            self._shared.met.pop(self.meetings - 1, None)  # everybody has left the one before
        return [met[rank] for rank in range(self.world)]

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.failure is not None or done(), self.timeout)
            self.check()
            if done():
                return
        self.fail(f"rank {self.rank} waited {self.timeout:g} s at {what}; let every rank come to the same steps")

    def meeting_is_over(self) -> None:
        """Do nothing: nobody waits for that."""

    # ---- failure
    def check(self) -> None:
        if self._shared.failure is not None:
            raise DivergenceError(self._shared.failure)

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._announce(text)
        raise DivergenceError(self._shared.failure) from cause

    def _announce(self, text: str) -> None:
        with self._shared.changed:
            if self._shared.failure is None:
                self._shared.failure = text
            self._shared.changed.notify_all()

    @contextlib.contextmanager
    def shared_fate(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, DivergenceError):
                self._announce(f"rank {self.rank}: {what} raised {type(error).__name__}: {error}")
            raise


@dataclass(frozen=True, slots=True)
class _ToCome:
    """A message that is to come. Implements `Incoming`."""

    channel: "ThreadChannel"
    address: Address

    def wait(self, stream: Stream) -> Parts | None:
        return self.channel.take(self.address)


class ThreadChannel:
    """Implements `Channel` between threads.

    What is sent is copied: stages of one process would otherwise share memory."""

    def __init__(self, mail: _Mail, rank: int, device: torch.device, patience: float) -> None:
        self._mail = mail
        self._rank = rank
        self._device = device
        self._patience = patience

    def send(self, peer: int, address: Address, content: Parts) -> None:
        copies = [
            None if tensor is None or layout is None else copy_of(tensor, layout, self._device)
            for tensor, layout in zip(content.tensors, content.form.tensors, strict=True)
        ]
        self._post(peer, address, Parts(content.form, copies))

    def send_void(self, peer: int, address: Address) -> None:
        self._post(peer, address, None)

    def _post(self, peer: int, address: Address, content: Parts | None) -> None:
        with self._mail.changed:
            self._mail.arrived[address, peer].append(content)
            self._mail.changed.notify_all()

    def receive(self, peer: int, address: Address) -> _ToCome:
        return _ToCome(self, address)

    def take(self, address: Address) -> Parts | None:
        """Wait for what comes to an address of this rank."""
        mail = self._mail.arrived[address, self._rank]
        with self._mail.changed:
            if not self._mail.changed.wait_for(lambda: bool(mail), self._patience):
                raise PipelineError(f"rank {self._rank} waits for the {address}: nothing came in {self._patience:g} s")
            return mail.popleft()
