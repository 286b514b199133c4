"""The transport between processes of one host: shards and buckets are read where they lie."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from retrograde.devices import Stream
from retrograde.transport.connections import Connections
from retrograde.transport.mapped.arena import SharedFlags, SharedWord
from retrograde.transport.mapped.mirror import ArenaMirror, Sighting, Sights, can_mirror
from retrograde.transport.mapped.neighbours import Neighbour, Neighbours
from retrograde.transport.messages import (
    Handed,
    Key,
    LetGo,
    Meet,
    MessageError,
    Placed,
    ShardData,
    SharedPlace,
    Stamp,
    ToReceiver,
)
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.protocol import Memory, Position, Rest, ShardServer, Work

_LOOK_AGAIN = 0.002  # seconds, where a rank may have come to rest without having seen that somebody waits for it
_BY_THEMSELVES = 1.0  # seconds, in which ranks that have passed a fence let go of what shows in their pages
_RESTS = len(Rest)
_GONE = 2**62  # a state later than any: a reader that finds it asks


class _Readable(NamedTuple):
    """Another rank's shard of a unit, in memory that this rank has mapped."""

    owner: Neighbour
    place: SharedPlace
    state: memoryview  # one word: the owner's clock and `Rest`
    waits: memoryview  # this rank's flag in the owner's memory: it waits for the owner to come to rest
    sees: memoryview | None  # another one: the owner's shards show in its pages. None: they may not

    def is_at_rest(self, stamp: Stamp) -> bool:
        return bool(self.state[0] == stamp.clock * _RESTS + Rest.AT_REST.value)


class _Look(Enum):
    READY = auto()
    LATER = auto()  # its owner is about to come to rest
    ASK = auto()  # by a message, as over connections


class MappedTransport(OneSidedTransport):
    """Implements `Transport`. What cannot be read or lent in place goes as it does over connections."""

    def __init__(self, connections: Connections, neighbours: Neighbours, shards: ShardServer, timeout: float) -> None:
        self._neighbours = neighbours
        self._readable: dict[tuple[int, int], _Readable] = {}  # by unit and owner
        self._state = SharedWord(neighbours.arena)
        self._seen = SharedFlags(neighbours.arena)  # set by those in whose pages this rank's shards show
        self.sights = Sights()
        self._mirrors: weakref.WeakSet[ArenaMirror] = weakref.WeakSet()
        self._places: dict[int, SharedPlace] = {}  # of shards that others have to be told of, by unit
        self._told_of: dict[tuple[int, int], Placed] = {}  # by unit and owner, whose memory may not be mapped yet
        super().__init__(connections, shards, timeout)
        self._publish()

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """What others read lies in the arena. Before it goes, when the model does, they are told to ask."""
        if memory is not Memory.SHARD:
            return super().allocate(memory, numel, dtype, stream)
        return self._neighbours.allocate(numel, dtype, self._leave())

    def _leave(self) -> Callable[[], Callable[[], bool]]:
        """What is done before a shard goes: others ask from then on. Returns whether it shows in their pages."""
        state, seen = self._state, self._seen

        def leave() -> Callable[[], bool]:
            state.close(_GONE)
            return seen.are_set

        return leave

    # ---- shards that show in pages (mirror.py)
    def mirror(self, unit: int, spans: Mapping[int, slice], dtype: torch.dtype, returns: bool) -> ArenaMirror | None:
        """Others are told where the shard lies before the next meeting."""
        if not can_mirror():
            return None
        own = spans[self.rank]
        shard = self._neighbours.allocate_shared(own.stop - own.start, dtype, self._leave())
        place = None if shard is None else self._neighbours.arena.place_of(shard)
        if shard is None or place is None:
            return None
        made = ArenaMirror(self, unit, spans, shard, Sighting(self._neighbours.arena, place, None), returns)
        self._mirrors.add(made)
        self._places[unit] = place
        return made

    def _tell_places(self) -> None:
        if self._places:
            message = Placed(self.number, self._places, self._state.place, self._seen.place)
            self._places = {}
            for peer in self.connections.peers:
                self._post(peer, message)

    def sighting(self, unit: int, owner: int) -> Sighting | None:
        found = self.readable(unit, owner)
        if found is None or found.sees is None:
            return None
        return Sighting(found.owner.arena, found.place, found.sees)

    def is_at_rest(self, unit: int, owner: int, stamp: Stamp) -> bool:
        """For a reader that has edited nothing since the last step."""
        if stamp.edits or stamp.stray:
            return False
        if owner == self.rank:
            return self._shards.state() == (stamp.clock, Rest.AT_REST)
        found = self.readable(unit, owner)
        return found is not None and found.is_at_rest(stamp)

    def wake(self, owner: int) -> None:
        self._neighbours.found[owner].outbox.ring()

    def read_into(self, mirror: ArenaMirror, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        self.check()

        def show(owner: int, memory: torch.Tensor) -> bool:
            if mirror.show(owner, stamp):
                return True
            mirror.will_copy(owner)
            return self._copy(mirror.unit, owner, stamp, memory)

        return _MappedRead(self, mirror.unit, name, stamp, into, show, mirror.will_copy)

    def reclaim(self, at_fence: bool) -> None:
        with self.connections.changed:  # which is a barrier too: what was published comes before the flags are read
            if not self._seen.are_set():
                return
            if at_fence:
                self.connections.wait_until(lambda: not self._seen.are_set(), _BY_THEMSELVES, _LOOK_AGAIN)
            for rank in self._seen.set_by():
                self.connections.tell(rank, LetGo(self.number))
        self.wait_for(self._seen.set_by, "letting go of this rank's shards", look_again=_LOOK_AGAIN)

    def meet(self, position: Position) -> list[Position]:
        self._tell_places()
        return super().meet(position)

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        self.check()

        def copy(owner: int, memory: torch.Tensor) -> bool:
            return self._copy(unit, owner, stamp, memory)

        return _MappedRead(self, unit, name, stamp, into, copy, lambda owner: None)

    def _copy(self, unit: int, owner: int, stamp: Stamp, memory: torch.Tensor) -> bool:
        """Says whether what was copied is the shard at rest (Rule 2)."""
        found = self.readable(unit, owner)
        assert found is not None
        memory.copy_(found.owner.arena.view(found.place, memory.numel(), memory.dtype))
        return found.is_at_rest(stamp)

    def ask_for(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        return super().read(unit, name, stamp, into)

    def readable(self, unit: int, owner: int) -> _Readable | None:
        at = unit, owner
        neighbour = self._neighbours.found.get(owner) if at in self._told_of else None
        if neighbour is not None:
            told = self._told_of.pop(at)
            sees = self._flag(neighbour, told.seen)
            self._note_readable(neighbour, unit, owner, told.shards[unit], told.state, sees)
        return self._readable.get(at)

    def shards_changed(self) -> None:
        self._publish()
        super().shards_changed()

    def _publish(self) -> None:
        """Say whether the shards are at rest. Readers that wait for it are woken."""
        clock, rest = self._shards.state()
        self._state.set(clock * _RESTS + rest.value)
        if rest is Rest.AT_REST:
            for rank in self._state.take_flags():
                self._neighbours.found[rank].outbox.ring()

    def _shard_data(self, unit: int, found: torch.Tensor) -> ShardData:
        """With the place where the reader finds it next time."""
        return ShardData(self.number, unit, self._neighbours.arena.place_of(found), self._state.place)

    def _note_place(self, src: int, message: ShardData) -> None:
        neighbour = self._neighbours.found.get(src)
        if neighbour is None or message.place is None or message.state is None:
            return
        known = self._readable.get((message.unit, src))
        sees = None if known is None else known.sees
        self._note_readable(neighbour, message.unit, src, message.place, message.state, sees)

    def _note_readable(
        self,
        neighbour: Neighbour,
        unit: int,
        owner: int,
        place: SharedPlace,
        state: SharedPlace,
        sees: memoryview | None,
    ) -> None:
        word = neighbour.arena.word(state)
        self._readable[unit, owner] = _Readable(neighbour, place, word, self._flag(neighbour, state), sees)

    def _flag(self, neighbour: Neighbour, place: SharedPlace) -> memoryview:
        """This rank's."""
        return neighbour.arena.flags(place)[self.rank : self.rank + 1]

    # ---- gradients
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        """Parcels for those who can map them: their memory is free again when it has been copied."""
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
        self._neighbours.arena.collect_parcels()  # the next ones come with the next backward, if there is one

    # ---- agreement
    def _send_position(self, peer: int, message: Meet, data: Sequence[torch.Tensor]) -> None:
        if self._collectives is None:
            self._post(peer, message, data)
        else:  # it must not overtake what was said of the order of collectives (collectives.py, Rule 1)
            super()._send_position(peer, message, data)

    def _post(self, dst: int, message: ToReceiver, data: Sequence[torch.Tensor] = ()) -> None:
        """By a letter, if the other rank has a box, and room in it."""
        if not self.connections.post(dst, message, data):
            self._send(dst, message, data)

    # ---- what comes
    def on_message(self, src: int, message: ToReceiver, data: Sequence[torch.Tensor]) -> None:
        match message:
            case Placed():
                for unit in message.shards:
                    self._readable.pop((unit, src), None)
                    self._told_of[unit, src] = message
            case LetGo():
                for mirror in list(self._mirrors):
                    mirror.keep_of(src)
            case Handed():
                numel = self._shards.shard_numel(message.key.unit)
                arena = self._neighbour(src).arena
                self._parts[message.key, src] = arena.unpack(message.place, numel, message.dtype, self.rank)
                self.connections.notify()
            case ShardData():
                self._note_place(src, message)
                super().on_message(src, message, data)
            case _:
                super().on_message(src, message, data)

    def _neighbour(self, src: int) -> Neighbour:
        if src not in self._neighbours.found:
            raise MessageError("a gradient was handed over in memory that is not mapped")
        return self._neighbours.found[src]


class _MappedRead:
    """Taking a unit's shards, each as soon as its owner is at rest."""

    def __init__(
        self,
        transport: MappedTransport,
        unit: int,
        name: str,
        stamp: Stamp,
        into: Mapping[int, torch.Tensor],
        take: Callable[[int, torch.Tensor], bool],
        will_ask: Callable[[int], None],
    ) -> None:
        """`take`: of an owner at rest, the shard to its place; says whether it was at rest until then. `will_ask`: what
        this owner sends comes to its place."""
        self._transport = transport
        self._unit = unit
        self._name = name
        self._stamp = stamp
        self._waiting = dict(into)
        self._take = take
        self._will_ask = will_ask
        self._asked: list[Work] = []
        self._go_on()

    def _go_on(self) -> None:
        """Take what is ready, and ask for what will not be."""
        asked = {}
        for owner in list(self._waiting):
            look = self._look(owner)
            if look is _Look.LATER:
                continue
            memory = self._waiting.pop(owner)  # nothing of it is kept once it has come
            if look is _Look.ASK or not self._take(owner, memory):
                asked[owner] = memory
        if asked:
            for owner in asked:
                self._will_ask(owner)
            work = self._transport.ask_for(self._unit, self._name, self._stamp, asked)
            self._asked.append(work)

    def _look(self, owner: int) -> _Look:
        found = self._transport.readable(self._unit, owner)
        if found is None or found.owner.outbox.finished or self._stamp.edits or self._stamp.stray:
            return _Look.ASK  # one that has finished waits until it is asked for nothing more
        clock, rest = divmod(found.state[0], _RESTS)
        if clock < self._stamp.clock or (clock == self._stamp.clock and rest == Rest.STEPPING.value):
            return _Look.LATER
        return _Look.READY if found.is_at_rest(self._stamp) else _Look.ASK

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
