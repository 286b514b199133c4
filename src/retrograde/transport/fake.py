"""One rank of a world of any size, whose other ranks are imagined: they do as this one does, and nothing travels.

Their shards are left as they are in the page (nobody writes them) and their gradients are zeros. So values mean
nothing; what is counted, and when, is what the ranks of that world would count. Planning runs on this.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch

from retrograde.devices import Stream, Streams
from retrograde.errors import DivergenceError, PipelineError
from retrograde.transport.messages import Address, Form, Key, Stamp
from retrograde.transport.protocol import Memory, Parts, Position, ShardServer, Way, Work
from retrograde.transport.tensors import empty


class _Done:
    """Work of which nothing is left to do."""

    def wait(self, stream: Stream) -> None:
        pass

    def done(self) -> bool:
        return True


class FakeRanks:
    """Implements `PipelineRanks` for one rank whose others are imagined."""

    def __init__(self, world: int, rank: int = 0, brings: Parts | None = None) -> None:
        """`brings`: what comes from stages of a pipeline that are before this rank's."""
        self.world = world
        self.rank = rank
        self.transports: list[FakeTransport] = []
        self.channels: list[FakeChannel] = []
        self._brings = brings

    def transport(self, shards: ShardServer, streams: Streams, timeout: float) -> "FakeTransport":
        made = FakeTransport(self.rank, self.world, shards, streams, timeout)
        self.transports.append(made)
        return made

    def channel(self, streams: Streams, patience: float, ways: Sequence[Way]) -> "FakeChannel":
        made = FakeChannel(self.rank, streams.device, self._brings)
        self.channels.append(made)
        return made

    def say_goodbye(self) -> None:
        """Do nothing: there is nobody to hear it."""


class FakeTransport:
    """Counts what it is asked for. Implements `Transport`."""

    def __init__(self, rank: int, world: int, shards: ShardServer, streams: Streams, timeout: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.meetings = 0
        self.calls: Counter[str] = Counter()  # reads, puts and meetings
        self.nbytes: Counter[str] = Counter()  # into this rank by reads, out of it by puts
        self.allocated: Counter[Memory] = Counter()  # bytes, ever
        self._shards = shards
        self._streams = streams
        self._put: dict[Key, torch.dtype] = {}

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        self.allocated[memory] += numel * dtype.itemsize
        return stream.empty(numel, dtype)

    def _count(self, what: str, nbytes: int = 0) -> None:
        self.calls[what] += 1
        self.nbytes[what] += nbytes

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        self._count("read", sum(memory.nbytes for memory in into.values()))
        return _Done()

    def shards_changed(self) -> None:
        """Do nothing: nobody reads the shards."""

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        self._count("put", sum(piece.nbytes for pieces in parts.values() for piece in pieces))
        self._put[key] = next((pieces[0].dtype for pieces in parts.values()), torch.float32)
        return _Done()

    def arrived(self, key: Key, src: int) -> bool:
        return key in self._put

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        stream = self._streams.reducing
        part = stream.empty(self._shards.shard_numel(key.unit), self._put[key])
        stream.run(part.zero_)
        return part

    def discard_parts(self) -> None:
        self._put = {key: dtype for key, dtype in self._put.items() if key.meeting >= self.meetings}

    # ---- agreement
    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        self.meetings += 1
        self._count("meeting")
        return [position] * self.world

    def meeting_is_over(self) -> None:
        """Do nothing: nobody waits for that."""

    # ---- failure
    def check(self) -> None:
        """Do nothing: nobody else can fail."""

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        raise DivergenceError(text) from cause

    @contextlib.contextmanager
    def shared_fate(self, what: str) -> Iterator[None]:
        yield


class _Came(NamedTuple):
    """What an imagined rank has sent. Implements `Incoming`."""

    parts: Parts

    def wait(self, stream: Stream) -> Parts:
        return self.parts


class FakeChannel:
    """Counts what is sent. Implements `Channel`. What comes is zeros: gradients of what was sent, and else `brings`."""

    def __init__(self, rank: int, device: torch.device, brings: Parts | None) -> None:
        self.calls: Counter[str] = Counter()  # sends and receives
        self.nbytes: Counter[str] = Counter()
        self._rank = rank
        self._device = device
        self._brings = brings
        self._sent: dict[Address, Form] = {}

    def send(self, peer: int, address: Address, content: Parts) -> None:
        self._count("send", content)
        self._sent[address] = content.form

    def send_void(self, peer: int, address: Address) -> None:
        """Do nothing: nobody waits for it."""

    def receive(self, peer: int, address: Address) -> _Came:
        form = self._form(address)
        came = Parts(form, [None if each is None else empty(each, self._device).zero_() for each in form.tensors])
        self._count("receive", came)
        return _Came(came)

    def _form(self, address: Address) -> Form:
        there = Address(True, address.stage, address.microbatch)
        if not address.forward and there in self._sent:
            sent = self._sent.pop(there)
            return Form(tuple(each if each is not None and each.requires_grad else None for each in sent.tensors), None)
        if self._brings is None:
            raise PipelineError(
                f"rank {self._rank} waits for the {address}, of which imagined ranks know nothing; give "
                f"FakeRanks(..., brings=...)"
            )
        return self._brings.form

    def _count(self, what: str, content: Parts) -> None:
        self.calls[what] += 1
        self.nbytes[what] += sum(tensor.nbytes for tensor in content.tensors if tensor is not None)
