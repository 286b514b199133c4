"""Tensors of a device over a transport of the host: what travels is staged in the host's memory.

[Note: staging]
A transport of the host reads and writes host memory, at once. So what leaves a device is copied to the host first, and
what arrives is copied to the device by the stream that is given.

    read    the owner's service thread ── to_host ──> bytes ──> host memory ── copy on the reader's stream ──> page
    put     bucket ── to_host ──> bytes ──> host memory ── copy on the reducing stream ──> part of a sum

The host waits for each copy out of the device. That is the price of a way that needs no other rank's main thread: it
serves what strays from the order of collectives, and devices for which torch.distributed has no backend.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn

import torch

from retrograde.devices import Stream, Streams
from retrograde.transport.messages import Key, Stamp, Value
from retrograde.transport.protocol import Memory, Position, Rest, ShardServer, Transport, Work


class StagedShards:
    """Implements `ShardServer` for a transport of the host: shards of a device, as the host can read them."""

    def __init__(self, shards: ShardServer, streams: Streams) -> None:
        self._shards = shards
        self._streams = streams

    def shard_for(self, unit: int, stamp: Stamp) -> torch.Tensor | str:
        found = self._shards.shard_for(unit, stamp)
        return found if isinstance(found, str) else self._streams.serving.to_host(found)

    def shard_numel(self, unit: int) -> int:
        return self._shards.shard_numel(unit)

    def state(self) -> tuple[int, Rest]:
        """Say that readers have to ask: nobody else sees the memory."""
        return self._shards.state()[0], Rest.ASK


class _StagedRead(NamedTuple):
    """Shards on their way into host memory, and from there into a page."""

    work: Work
    came: Mapping[int, torch.Tensor]
    into: Mapping[int, torch.Tensor]

    def wait(self, stream: Stream) -> None:
        self.work.wait(stream)
        for owner, memory in self.into.items():
            stream.run(lambda owner=owner, memory=memory: memory.copy_(self.came[owner]))  # type: ignore[misc]

    def done(self) -> bool:
        return False  # something is left to be issued


def from_host(came: torch.Tensor, streams: Streams) -> torch.Tensor:
    """Copy what came for a sum into memory of the reducing stream."""
    if streams.on_host:
        return came
    stream = streams.reducing
    part = stream.empty(came.numel(), came.dtype)
    stream.run(lambda: part.copy_(came))
    return part


class StagedTransport:
    """Implements `Transport` for tensors of a device, over a transport of the host."""

    def __init__(self, host: Transport, streams: Streams) -> None:
        """`host` was made with `StagedShards`."""
        self._host = host
        self._streams = streams

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def world(self) -> int:
        return self._host.world

    @property
    def meetings(self) -> int:
        return self._host.meetings

    @property
    def timeout(self) -> float:
        return self._host.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._host.timeout = seconds

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        return stream.empty(numel, dtype)

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        came = {owner: torch.empty_like(memory, device="cpu") for owner, memory in into.items()}
        return _StagedRead(self._host.read(unit, name, stamp, came), came, into)

    def shards_changed(self) -> None:
        self._host.shards_changed()

    # ---- gradients, one by one
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        stream = self._streams.current()  # the caller runs this on the stream that has the parts
        return self._host.put(key, {dst: list(map(stream.to_host, pieces)) for dst, pieces in parts.items()})

    def arrived(self, key: Key, src: int) -> bool:
        return self._host.arrived(key, src)

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        return from_host(self._host.take(key, src, unit), self._streams)

    def discard_parts(self) -> None:
        self._host.discard_parts()

    # ---- agreement
    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        """Meet over the host's transport. A tensor that one rank has on its device comes to all others on theirs."""
        where: list[bool] = []
        value = [self._to_host(position.value, where), where]
        return [self._received(theirs) for theirs in self._host.meet(position._replace(value=value))]

    def meeting_is_over(self) -> None:
        self._host.meeting_is_over()

    def _to_host(self, value: Value, where: list[bool]) -> Value:
        """The value with host tensors only; `where` gets for each whether it was on the device."""
        if isinstance(value, torch.Tensor):
            where.append(value.device.type != "cpu")
            return self._streams.current().to_host(value) if where[-1] else value
        if isinstance(value, list | tuple):
            return [self._to_host(item, where) for item in value]
        return value

    def _received(self, position: Position) -> Position:
        assert isinstance(position.value, Sequence)
        value, where = position.value
        assert isinstance(where, Sequence)
        return position._replace(value=self._to_device(value, iter(where)))  # type: ignore[arg-type]

    def _to_device(self, value: Value, where: Iterable[bool]) -> Value:
        if isinstance(value, torch.Tensor):
            return value.to(self._streams.device) if next(iter(where)) else value
        if isinstance(value, list | tuple):
            return [self._to_device(item, where) for item in value]
        return value

    # ---- failure
    def check(self) -> None:
        self._host.check()

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._host.fail(text, cause)

    def shared_fate(self, what: str) -> AbstractContextManager[None]:
        return self._host.shared_fate(what)
