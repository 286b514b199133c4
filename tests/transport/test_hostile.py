"""Whoever reaches the group's store or a rank's wires may lie: nothing of it is executed, and the liar is named."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zmq
from torch.distributed.distributed_c10d import _get_process_group_store

import retrograde as rg
from retrograde.devices import Stream
from retrograde.transport import Key, Position, Reason
from retrograde.transport.connections import Connections
from retrograde.transport.envelope import INLINE, LENGTHS, LIMIT, pieces
from retrograde.transport.mapped.mailbox import Outbox
from retrograde.transport.mapped.neighbours import Neighbours
from retrograde.transport.messages import (
    Ask,
    Contact,
    Goodbye,
    Meet,
    PackedPosition,
    Put,
    Read,
    ShardData,
    Stamp,
    TensorForm,
    encode,
    pack,
)
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.wires import CHUNK, Lost, Wires
from tests.harness import RankPool
from tests.small import build
from tests.transport.shards import Shards

Ranks = Callable[[int], RankPool]
ELEMENTS = 4


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path(self.path),)


# ---- the store
def _lies_in_the_store(rank: int, world: int, path: str) -> str:
    group = dist.new_group()
    said = ""
    if rank == 0:
        store = _get_process_group_store(group)
        store.set("retrograde/host/0", store.get("retrograde/host/1"))
        store.set("retrograde/0", pickle.dumps(Touch(path)))
    else:
        with pytest.raises(rg.DivergenceError) as caught:
            rg.shard(build(), process_group=group, timeout=5.0)
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_pickle_in_the_store_is_not_executed(ranks: Ranks, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    said = ranks(2).run(_lies_in_the_store, str(trap), timeout=40.0)[1]
    assert not trap.exists()
    start = "rank 1: what the process group's store says about rank 0 (key retrograde/0) is not an address of a rank: "
    assert said.startswith(start), said
    assert said.endswith("Something else writes to that store, or the ranks run different versions of retrograde"), said


# ---- a connection
def _raw(*fields: object) -> bytes:
    """A message of the given fields, whatever they are."""
    head = encode(list(fields))
    return LENGTHS.pack(len(head), 0) + head


def _with_data(message: object, nbytes: int) -> bytes:
    """A message that announces so many bytes of tensors."""
    head = encode(message)
    return LENGTHS.pack(len(head), nbytes) + head


def _meet(value: object, number: int = 1, times: int = 1) -> Meet:
    position = PackedPosition(Reason.VALUE, "a value", {}, {}, value)  # type: ignore[arg-type]
    return Meet(0, number, [position] * times)


NESTED = b"\x91" * 1_000_000
LARGE = TensorForm(torch.float32, (2**40,))
ATTACKS: dict[str, tuple[bytes, str]] = {
    "a message of 2^60 bytes": (LENGTHS.pack(2**60, 0), f"a message of {2**60} bytes was announced in 16; messages"),
    "a message of no bytes": (LENGTHS.pack(0, 0), "a message of 0 bytes was announced"),
    "a message without end": (LENGTHS.pack(LIMIT + 1, 0), f"a message of {LIMIT + 1} bytes was announced"),
    "not msgpack": (LENGTHS.pack(4, 0) + b"\xc1\xc1\xc1\xc1", "MessageError"),
    "half a message": (LENGTHS.pack(2, 0) + encode(Ask(0))[:2], "MessageError"),
    "a list in a list in a list": (LENGTHS.pack(len(NESTED), 0) + NESTED, "MessageError"),
    "an unknown message": (_raw("explode", 0), "explode"),
    "too many fields": (_raw("ask", 0, "more"), "MessageError"),
    "text for a number": (_raw("read", 0, "unit", [0, 0, 0]), "Expected `int`, got `str`"),
    "a unit below 0": (_raw("read", 0, -1, [0, 0, 0]), "Expected `int` >= 0"),
    "a unit that is not there": (bytes(pieces(Read(0, 7, Stamp(0, 0, 0)))[0]), "there is no unit 7"),
    "an unknown dtype": (_raw("put", 0, [0, 0, 0, 0], "os.system"), "'os.system' is not a dtype"),
    "an unknown reason to meet": (_raw("meet", 0, 1, [["tea", "", {}, {}, None]]), "Invalid enum value 'tea'"),
    "a large gradient": (
        _with_data(Put(0, Key(0, 0, 0, 0), torch.float32), 2**60),
        f"{2**60} bytes of tensors with a Put that takes {4 * ELEMENTS}",
    ),
    "a gradient of no bytes": (
        _with_data(Put(0, Key(0, 0, 0, 0), torch.float32), 0),
        f"0 bytes of tensors with a Put that takes {4 * ELEMENTS}",
    ),
    "a large answer": (
        _with_data(ShardData(0, 0), 2**60),
        f"{2**60} bytes of tensors with a ShardData that takes {4 * ELEMENTS}",
    ),
    "a value that is not there": (
        _with_data(_meet(LARGE), 16) + bytes(16),
        f"16 bytes of tensors with a meeting's value that has {2**42}",
    ),
    "another rank's position": (pieces(_meet(3, times=2))[0].tobytes(), "2 positions at a meeting, where it tells 1"),
    "tensors with a question": (_with_data(Ask(0), 8) + bytes(8), "8 bytes of tensors with a Ask that takes 0"),
    "tensors for nobody": (_with_data(Ask(1), 8) + bytes(8), "8 bytes of tensors for receiver 1, which is not there"),
    "tensors for a rank": (_with_data(Goodbye(), 8) + bytes(8), "8 bytes of tensors with a Goodbye that takes 0"),
    "less than was announced": (_with_data(Ask(0), 8) + bytes(7), "8 bytes of tensors were announced with a Ask"),
    "more than was announced": (_with_data(Ask(0), 0) + bytes(7), "0 bytes of tensors were announced with a Ask"),
    "nothing": (b"", "0 bytes came, which is less than two lengths"),
    "a message for a pipeline": (_raw("void", 0, [True, 0, 0], 0), "a Void was sent to an engine"),
}


class Liar:
    """Somebody who has the keys of a rank, and says to rank 0 what a rank does not say."""

    def __init__(self, rank: int = 1) -> None:
        self.wires = Wires(rank, None)
        self.hung_up = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ends:
            if Lost(0) in self.wires.wait(20.0):
                self.hung_up.set()
        self.wires.close()

    def say(self, envelope: bytes) -> None:
        """These bytes by the control wire."""
        self.wires.call(0)
        with self.wires._sending:
            self.wires._control.send(0, envelope)

    def end(self) -> None:
        self._ends = True
        self.wires.ring()
        self._thread.join(20.0)


Pair = tuple[OneSidedTransport, Liar]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Rank 0 of 2, and somebody who has the keys of rank 1."""
    here, liar = Wires(0, None), Liar()
    here.admit({1: liar.wires.contact})
    liar.wires.admit({0: here.contact})
    connections = Connections(0, 2, here)
    try:
        yield OneSidedTransport(connections, Shards(ELEMENTS), 20.0), liar
    finally:
        connections.abandon("the test has ended")
        liar.end()


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.timeout(60)
def test_what_is_not_a_message_closes_the_connection(pair: Pair, name: str) -> None:
    transport, liar = pair
    sent, reason = ATTACKS[name]
    into = torch.zeros(ELEMENTS)
    waits = transport.read(0, "a unit", Stamp(0, 0, 0), {1: into})
    liar.say(sent)
    with pytest.raises(rg.DivergenceError) as caught:
        waits.wait(Stream())
    said = str(caught.value)
    assert said.startswith("rank 0: the connection to rank 1 was closed by rank 0, which could not take what came")
    assert reason in said, said
    assert torch.equal(into, torch.zeros(ELEMENTS))


@pytest.fixture
def shared() -> Iterator[tuple[Connections, Outbox]]:
    """Rank 0 of 2, and the box in its memory to which rank 1 writes."""
    here, there = Wires(0, None), Wires(1, None)
    here.admit({1: there.contact})
    there.admit({0: here.contact})
    neighbours = Neighbours(0, 2)
    connections = Connections(0, 2, here, neighbours=neighbours)
    try:
        yield connections, Outbox(neighbours.arena.control, 1, 2)
    finally:
        connections.abandon("the test has ended")
        there.close()


LETTERS = {
    "of 2^60 bytes": ((2**60).to_bytes(8, "little"), f"a letter of {2**60} bytes in a box of "),
    "longer than its box": ((2**17 + 1).to_bytes(8, "little"), f"a letter of {2**17 + 1} bytes in a box of {2**17}"),
    "of no bytes": (bytes(8), "0 bytes came, which is less than two lengths"),
}


@pytest.mark.parametrize("somebody_waits", (True, False))
@pytest.mark.parametrize("name", LETTERS)
@pytest.mark.timeout(60)
def test_what_is_not_a_letter_closes_the_connection(
    shared: tuple[Connections, Outbox], name: str, somebody_waits: bool
) -> None:
    """Whether the main thread finds it or the service thread, which lives on."""
    connections, outbox = shared
    transport = OneSidedTransport(connections, Shards(ELEMENTS), 20.0)
    waits = transport.read(0, "a unit", Stamp(0, 0, 0), {1: torch.zeros(ELEMENTS)})
    sent, reason = LETTERS[name]
    outbox._box._copy_in(0, memoryview(sent))
    outbox._box._written[0] = 2**40  # so much more of it seems to have come
    outbox.ring()
    if not somebody_waits:
        assert _cannot_be_reached(connections, 1)
    with pytest.raises(rg.DivergenceError) as caught:
        waits.wait(Stream())
    said = str(caught.value)
    assert said.startswith("rank 0: the connection to rank 1 was closed by rank 0, which could not take what came")
    assert reason in said, said
    outbox.ring()
    connections.take_letters()  # nothing more is taken from there


@pytest.mark.timeout(60)
def test_who_sends_more_than_a_message_can_have_is_disconnected(pair: Pair) -> None:
    """Before memory is taken for it."""
    transport, liar = pair
    waits = transport.read(0, "a unit", Stamp(0, 0, 0), {1: torch.zeros(ELEMENTS)})
    liar.say(bytes(LENGTHS.size + LIMIT + INLINE + 1))
    assert liar.hung_up.wait(20.0)
    assert not waits.done() and transport.connections._liveness.cause is None, "it was received"


@pytest.mark.timeout(60)
def test_bytes_that_nobody_announced_are_kept_within_limits(pair: Pair) -> None:
    transport, liar = pair
    liar.wires.call(0)
    contact = liar.wires._contacts[0]
    junk = memoryview(bytes(CHUNK))
    with liar.wires._sending:
        liar.wires._bulk.call(0, contact.bulk, contact)
        lent = [liar.wires._bulk.lend(0, junk) for _ in range(128)]
    liar.wires.send(0, _meet(3))  # messages still come
    assert transport.meet(Position(Reason.VALUE, "a value", {}, {}, 2))[1].value == 3
    waiting = transport.connections._arrivals[1]._chunks
    deadline = time.monotonic() + 20.0
    while len(waiting) < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # in which all of them would come
    assert 16 <= len(waiting) <= 32 and not all(each.done for each in lent)


@pytest.mark.timeout(60)
def test_only_the_liar_is_hung_up_on() -> None:
    here, liar, honest = Wires(0, None), Liar(1), Liar(2)
    here.admit({1: liar.wires.contact, 2: honest.wires.contact})
    connections = Connections(0, 3, here)
    for each in (liar, honest):
        each.wires.admit({0: here.contact})
        each.wires.call(0)
        connections.listen_to(1 if each is liar else 2)
    try:
        liar.say(b"")
        assert _cannot_be_reached(connections, 1)
        assert not honest.hung_up.is_set()
        connections.send(2, Ask(0))
    finally:
        connections.abandon("the test has ended")
        liar.end()
        honest.end()


def _cannot_be_reached(connections: Connections, rank: int) -> bool:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            connections.send(rank, Ask(0))
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.timeout(60)
def test_a_pickle_over_a_connection_is_not_executed(pair: Pair, tmp_path: Path) -> None:
    transport, liar = pair
    trap = tmp_path / "executed"
    evil = pickle.dumps(Touch(str(trap)))
    waits = transport.read(0, "a unit", Stamp(0, 0, 0), {1: torch.zeros(ELEMENTS)})
    liar.say(LENGTHS.pack(len(evil), 0) + evil)
    with pytest.raises(rg.DivergenceError, match="rank 0: the connection to rank 1 was closed by rank 0"):
        waits.wait(Stream())
    assert liar.hung_up.wait(20.0)
    assert not trap.exists()


@pytest.mark.timeout(60)
def test_what_nobody_asked_for_takes_no_memory(pair: Pair) -> None:
    """A page that this rank no longer waits for is read and forgotten, and the next message is understood."""
    transport, liar = pair
    liar.wires.send(0, ShardData(0, 0), [torch.ones(2**20)])
    liar.wires.send(0, _meet(3))
    assert transport.meet(Position(Reason.VALUE, "a value", {}, {}, 2))[1].value == 3


@pytest.mark.timeout(60)
def test_too_many_messages_for_nobody(pair: Pair) -> None:
    transport, liar = pair
    waits = transport.read(0, "a unit", Stamp(0, 0, 0), {1: torch.zeros(ELEMENTS)})
    for _ in range(4097):
        liar.wires.send(0, Ask(2))
    with pytest.raises(rg.DivergenceError, match="more than 4096 messages for engines"):
        waits.wait(Stream())


# ---- strangers
@pytest.mark.parametrize("wire", ("control", "bulk"))
@pytest.mark.timeout(60)
def test_who_is_not_a_rank_is_not_heard(pair: Pair, wire: str) -> None:
    """He knows all that is public, and neither a key nor a secret."""
    transport, liar = pair
    stranger, known = Wires(1, None), liar.wires._contacts[0]
    without_secret = Contact(known.key, stranger.contact.secret, known.control, known.bulk)
    with contextlib.closing(stranger), contextlib.suppress(zmq.ZMQError):  # he may be turned away before he has spoken
        if wire == "control":
            stranger._control.call(0, known.control, without_secret)
            stranger._control.send(0, bytes(pieces(_meet(4))[0]))
        else:
            stranger._bulk.call(0, known.bulk, without_secret)
            stranger._bulk.send(0, b"junk")
        deadline = time.monotonic() + 20.0
        while Lost(0) not in stranger.wait(1.0):
            assert time.monotonic() < deadline, "he was let in"
    liar.wires.send(0, _meet(3))
    assert transport.meet(Position(Reason.VALUE, "a value", {}, {}, 2))[1].value == 3
    assert not transport.connections._arrivals[1]._chunks


# ---- values of meetings
VALUES = [None, True, 3, -2.5, "text", b"bytes", torch.arange(6).view(2, 3), torch.tensor(1.5, dtype=torch.bfloat16)]


@pytest.mark.timeout(60)
def test_values_come_as_they_went(pair: Pair) -> None:
    transport, liar = pair
    values = [*VALUES, VALUES, [], [["a", 1], ["b", [None]]], torch.empty(0)]
    for number, value in enumerate(values, 1):
        packed, tensors = pack(value)  # type: ignore[arg-type]
        liar.wires.send(0, _meet(packed, number), tensors)
    for value in values:
        came = transport.meet(Position(Reason.VALUE, "a value", {}, {}))[1].value
        assert type(came) is type(value)
        for one, other in zip(came, value, strict=True) if isinstance(value, list) else [(came, value)]:  # type: ignore[arg-type]
            assert type(one) is type(other)
            if isinstance(other, torch.Tensor):
                assert isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
            else:
                assert one == other


def test_what_is_not_a_value_is_refused() -> None:
    with pytest.raises(TypeError, match="a complex cannot be brought to a meeting"):
        pack(1j)  # type: ignore[arg-type]
