"""The transport between processes of one host: shards and buckets are read where they lie."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import torch

from retrograde.devices import Stream
from retrograde.transport.connections import Connections
from retrograde.transport.mapped.arena import SharedWord
from retrograde.transport.mapped.neighbours import Neighbour, Neighbours
from retrograde.transport.messages import Handed, Key, Meet, MessageError, ShardData, SharedPlace, Stamp, ToReceiver
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.protocol import Memory, Rest, ShardServer, Work

_LOOK_AGAIN = 0.002  # seconds, where a rank may have come to rest without having seen that somebody waits for it
_RESTS = len(Rest)
_GONE = 2**62  # a state later than any: a reader that finds it asks


class _Readable(NamedTuple):
    """Another rank's shard of a unit, in memory that this rank has mapped."""

    owner: Neighbour
    place: SharedPlace
    state: memoryview  # one word: the owner's clock and `Rest`
    waits: memoryview  # this rank's flag in the owner's memory: it waits for the owner to come to rest


class _Look(Enum):
    READY = auto()
    LATER = auto()  # its owner is about to come to rest
    ASK = auto()  # by a message, as over connections


class MappedTransport(OneSidedTransport):
    """Implements `Transport` between processes of one host.

    What cannot be read or lent in place goes as it does over connections."""

    def __init__(self, connections: Connections, neighbours: Neighbours, shards: ShardServer, timeout: float) -> None:
        self._neighbours = neighbours
        self._readable: dict[tuple[int, int], _Readable] = {}  # by unit and owner
        self._state = SharedWord(neighbours.arena)
        super().__init__(connections, shards, timeout)
        self._publish()

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Allocate shards in the arena, where others read them.
        Before one goes, when the model does, readers are told to ask."""
        if memory is not Memory.SHARD:
            return super().allocate(memory, numel, dtype, stream)
        return self._neighbours.allocate(numel, dtype, partial(self._state.close, _GONE))

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        self.check()
        return _MappedRead(self, unit, name, stamp, into)

    def ask_for(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        return super().read(unit, name, stamp, into)

    def readable(self, unit: int, owner: int) -> _Readable | None:
        return self._readable.get((unit, owner))

    def shards_changed(self) -> None:
        self._publish()
        super().shards_changed()

    def _publish(self) -> None:
        """Say whether the shards are at rest, and wake the readers that wait for it. Readers whose memory this rank
        cannot map look again by themselves."""
        clock, rest = self._shards.state()
        self._state.set(clock * _RESTS + rest.value)
        if rest is Rest.AT_REST:
            for rank in self._state.take_flags():
                if rank in self._neighbours.found:
                    self._neighbours.found[rank].outbox.ring()

    def _shard_data(self, unit: int, found: torch.Tensor) -> ShardData:
        """Tell the reader of a shard also where it finds the shard the next time."""
        return ShardData(self.number, unit, self._neighbours.arena.place_of(found), self._state.place)

    def _note_place(self, src: int, message: ShardData) -> None:
        neighbour = self._neighbours.found.get(src)
        if neighbour is None or message.place is None or message.state is None:
            return
        state, flags = neighbour.arena.word(message.state), neighbour.arena.flags(message.state)
        waits = flags[self.rank : self.rank + 1]
        self._readable[message.unit, src] = _Readable(neighbour, message.place, state, waits)

    # ---- gradients
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        """Hand over parts as parcels to those who can map them:
        the parts have been copied then, and their memory is free again."""
        far = {dst: pieces for dst, pieces in parts.items() if not self._hand_over(key, dst, pieces)}
        return super().put(key, far)

    def _hand_over(self, key: Key, dst: int, pieces: Sequence[torch.Tensor]) -> bool:
        place = self._neighbours.parcel(pieces, dst)
        if place is None:
            return False
        self._post(dst, Handed(self.number, key, pieces[0].dtype, place))
        return True

    def arrived(self, key: Key, src: int) -> bool:
        self.connections.take_letters()
        return super().arrived(key, src)

    def discard_parts(self) -> None:
        super().discard_parts()
        self._neighbours.parcels.collect()  # the next ones come with the next backward, if there is one

    # ---- agreement
    def _send_positions(self, dst: int, message: Meet, data: Sequence[torch.Tensor]) -> None:
        self._post(dst, message, data)

    def _post(self, dst: int, message: ToReceiver, data: Sequence[torch.Tensor] = ()) -> None:
        """Send a message by a letter, if the other rank has a box, and room in it, else over the connection."""
        if not self.connections.post(dst, message, data):
            self._send(dst, message, data)

    # ---- what comes
    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        if isinstance(message, ShardData):
            self._note_place(src, message)
        if isinstance(message, Handed):
            numel = self._shards.shard_numel(message.key.unit)
            arena = self._neighbour(src).arena
            self._parts[message.key, src] = arena.unpack(message.place, numel, message.dtype, self.rank)
            self.connections.notify()
        else:
            super().on_message(src, message, data)

    def _neighbour(self, src: int) -> Neighbour:
        if src not in self._neighbours.found:
            raise MessageError("a gradient was handed over in memory that is not mapped")
        return self._neighbours.found[src]


class _MappedRead:
    """A read of a unit's shards, each as soon as its owner is at rest."""

    def __init__(
        self, transport: MappedTransport, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]
    ) -> None:
        self._transport = transport
        self._unit = unit
        self._name = name
        self._stamp = stamp
        self._waiting = dict(into)
        self._asked: list[Work] = []
        self._go_on()

    def _go_on(self) -> None:
        """Copy what is ready, and ask for what will not be."""
        asked = {}
        for owner in list(self._waiting):
            look = self._look(owner)
            if look is _Look.LATER:
                continue
            memory = self._waiting.pop(owner)  # nothing of it is kept once it has come
            if look is _Look.ASK or not self._copy(owner, memory):
                asked[owner] = memory
        if asked:
            work = self._transport.ask_for(self._unit, self._name, self._stamp, asked)
            self._asked.append(work)

    def _look(self, owner: int) -> _Look:
        found = self._transport.readable(self._unit, owner)
        if found is None or found.owner.outbox.finished or self._stamp.edits or self._stamp.stray:
            return _Look.ASK  # one that has finished waits until it is asked for nothing more
        clock, rest = divmod(found.state[0], _RESTS)
        if clock < self._stamp.clock or (clock == self._stamp.clock and rest == Rest.STEPPING.value):
            return _Look.LATER
        return _Look.READY if self._at_rest(found) else _Look.ASK

    def _at_rest(self, found: _Readable) -> bool:
        return found.state[0] == self._stamp.clock * _RESTS + Rest.AT_REST.value

    def _copy(self, owner: int, memory: torch.Tensor) -> bool:
        """Copy an owner's shard. Returns whether it was the shard at rest (Rule 2)."""
        found = self._transport.readable(self._unit, owner)
        assert found is not None
        memory.copy_(found.owner.arena.view(found.place, memory.numel(), memory.dtype))
        return self._at_rest(found)

    def wait(self, stream: Stream) -> None:
        while self._waiting:
            self._transport.wait_for(self._not_at_rest, f"reading unit {self._name}", look_again=_LOOK_AGAIN)
            self._go_on()
        for work in self._asked:
            work.wait(stream)

    def _not_at_rest(self) -> list[int]:
        late = [owner for owner in self._waiting if self._look(owner) is _Look.LATER]
        for owner in late:
            found = self._transport.readable(self._unit, owner)
            assert found is not None
            found.waits[0] = 1
        return late

    def done(self) -> bool:
        self._go_on()
        return not self._waiting and all(work.done() for work in self._asked)
