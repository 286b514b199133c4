"""The connections between ranks: much in both directions at once, strangers, ranks that leave, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

import retrograde as rg
from retrograde.devices import Stream
from retrograde.transport import Key, Position, Reason, connecting, leaving, wires
from retrograde.transport.arrivals import Arrivals
from retrograde.transport.connections import Connections
from retrograde.transport.envelope import pieces
from retrograde.transport.messages import (
    Fail,
    Goodbye,
    Message,
    MessageError,
    Put,
    ShardData,
    TcpAddress,
    UnixAddress,
    decode_contact,
    encode,
)
from retrograde.transport.one_sided import OneSidedTransport
from tests.harness import RankPool
from tests.multiproc.twin import Twin
from tests.small import batch, build, loss_of
from tests.stages import WITH_OTHERS
from tests.transport.delays import delayed
from tests.transport.hosts import apart
from tests.transport.shards import Shards

Ranks = Callable[[int], RankPool]
HOST = Stream()
LARGE = 2**20  # floats: more than a connection takes at once, three times over


def _transport(elements: int = 0) -> OneSidedTransport:
    connections = Connections.of(dist.group.WORLD)  # type: ignore[arg-type]
    transport = OneSidedTransport(connections, Shards(elements), 20.0)
    dist.barrier()  # as `shard()` does: data comes only when everybody has one
    return transport


def _everybody_sends(rank: int, world: int) -> list[str]:
    """Every main thread sends much before it takes anything, several times over."""
    transport = _transport(LARGE)
    wrong, sending = [], []
    for turn in range(3):
        parts = [torch.full((LARGE // 2,), float(10 * rank + turn)), torch.full((LARGE // 2,), -1.0)]
        sending.append(transport.put(Key(0, 0, 0, turn), dict.fromkeys(transport.connections.peers, parts)))
    for turn in range(3):
        for src in transport.connections.peers:
            got = transport.take(Key(0, 0, 0, turn), src, "a unit")
            want = torch.cat([torch.full((LARGE // 2,), float(10 * src + turn)), torch.full((LARGE // 2,), -1.0)])
            if not torch.equal(got, want):
                wrong.append(f"turn {turn} from rank {src}")
    for work in sending:
        work.wait(HOST)
    dist.barrier()
    return wrong


@WITH_OTHERS
def test_much_in_all_directions(ranks: Ranks, world: int) -> None:
    assert ranks(world).run(_everybody_sends) == [[]] * world


def _from_where_it_is(rank: int, world: int) -> tuple[bool, list[float]]:
    """What is sent must not change before `wait` returns, and may after it."""
    transport = _transport(16 * LARGE)
    peer, part = 1 - rank, torch.full((16 * LARGE,), float(rank))
    sending = transport.put(Key(0, 0, 0, 0), {peer: [part]})
    took_all_at_once = not sending.missing()
    sending.wait(HOST)
    part.fill_(7.0)
    got = transport.take(Key(0, 0, 0, 0), peer, "a unit")
    dist.barrier()
    return took_all_at_once, got.unique().tolist()


def test_memory_is_free_after_finish(ranks: Ranks) -> None:
    for rank, (at_once, values) in enumerate(ranks(2).run(_from_where_it_is)):
        assert not at_once, "nothing was left to the service thread, so nothing was tested"
        assert values == [1.0 - rank]


def _stranger(rank: int, world: int, far: bool) -> set[Any]:
    """Somebody connects to a rank that waits for another, and does not know its secret."""
    group = dist.new_group()
    store = _get_process_group_store(group)
    with apart() if far else contextlib.nullcontext():
        if rank == 1:
            store.set("retrograde/host/1", connecting.host())
            contact = decode_contact(store.get("retrograde/0"))
            for told in (contact.control, contact.bulk):
                address = "\0" + told.name[1:] if isinstance(told, UnixAddress) else (told.host, told.port)
                with socket.socket(socket.AF_INET if far else socket.AF_UNIX) as call:
                    call.connect(address)
                    call.sendall(b"x" * 64)  # not the language of the wires
        model = build()
        engine = rg.shard(model, 3, process_group=group, transport="one-sided")
    loss_of(model, batch(rank)).backward()
    dist.barrier()
    contact = engine.transport.connections.wires.contact
    return {type(contact.control), type(contact.bulk)}


@pytest.mark.parametrize("far", (False, True))
def test_strangers_are_turned_away(ranks: Ranks, far: bool) -> None:
    kind = TcpAddress if far else UnixAddress
    assert ranks(2).run(_stranger, far) == [{kind}, {kind}]


def _uneven(rank: int, world: int) -> list[str]:
    """Ranks that have made different numbers of groups before."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    model, plain = build(), build()
    engine = rg.shard(model, 3, timeout=10.0)
    loss_of(model, batch(0)).backward()
    loss_of(plain, batch(0)).backward()
    wrong = [name for name, p in plain.named_parameters() if not _same(engine.full_grad(name), p.grad)]
    dist.barrier()
    return wrong


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_ranks_with_different_groups(ranks: Ranks) -> None:
    assert ranks(2).run(_uneven) == [[], []]


def _service_threads() -> int:
    return sum(thread.name == "retrograde-service" for thread in threading.enumerate())


def _groups_that_end(rank: int, world: int) -> tuple[int, int, int]:
    before = _service_threads()
    during = 0
    for _ in range(3):
        group = dist.new_group(timeout=timedelta(seconds=30))
        model = build()
        rg.shard(model, 3, process_group=group)
        loss_of(model, batch(rank)).backward()
        during = max(during, _service_threads())
        dist.barrier()
        dist.destroy_process_group(group)
        del model, group
        gc.collect()
        dist.barrier()
    deadline = time.monotonic() + 20
    while _service_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, during, _service_threads()


def test_a_group_that_ends_takes_its_thread_along(ranks: Ranks) -> None:
    for before, during, after in ranks(2).run(_groups_that_end):
        assert during > before and after == before


def _drops(rank: int, world: int) -> str:
    model: Any = build()
    rg.shard(model, 3)
    if rank == 1:
        del model
        gc.collect()
    dist.barrier()
    if rank == 0:
        with pytest.raises(rg.DivergenceError) as told:
            model.state_dict()
        return str(told.value)
    return ""


def test_a_model_that_another_rank_has_let_go_of(ranks: Ranks) -> None:
    said = ranks(2).run(_drops, timeout=20.0)[0]  # less than the engine's own time-out
    assert said.startswith("rank 1 has let go of this model, which rank 0 ") and "dist.barrier()" in said


def _drops_the_order(rank: int, world: int) -> str:
    """Rank 0, by way of which all verdicts come, lets go of the model between two steps."""
    model: Any = build()
    rg.shard(model, 3, transport="collective")
    loss_of(model, batch(rank)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    if rank == 0:
        del model, optimizer
        gc.collect()
    dist.barrier()
    if rank == 1:
        with pytest.raises(rg.DivergenceError) as told:
            optimizer.step()
        return str(told.value)
    return ""


def test_a_model_with_collectives_that_another_rank_has_let_go_of(ranks: Ranks) -> None:
    said = ranks(2).run(_drops_the_order, timeout=20.0)[1]  # less than the engine's own time-out
    assert said.startswith("rank 0 has let go of this model, which rank 1 ") and "dist.barrier()" in said


def _forks(rank: int, world: int) -> list[str]:
    transport = _transport()
    if (child := os.fork()) == 0:
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as Python does when a process ends
        leaving.leave(list(leaving._open), None)
        transport.connections.say_goodbye()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    return [position.label for position in transport.meet(Position(Reason.VALUE, f"rank {rank}", {}, {}))]


def test_a_forked_process_ends_without_its_parents_connections(ranks: Ranks) -> None:
    assert ranks(2).run(_forks) == [["rank 0", "rank 1"]] * 2


def _falls_silent(rank: int, world: int) -> bool:
    """A process that is stopped closes no connection, and answers no heartbeat."""
    usual = wires.HEARTBEAT, wires.SILENCE
    wires.HEARTBEAT, wires.SILENCE = 50, 300  # milliseconds
    here, there = socket.socketpair()
    child = os.fork()
    made = wires.Wires(0 if child else 1, None)
    end = here if child else there
    end.sendall(encode(made.contact))
    made.admit({1 if child else 0: decode_contact(end.recv(1024))})
    if not child:
        while True:
            if made.wait(None):
                there.sendall(b".")
    try:
        made.send(1, Goodbye())
        assert here.recv(1) == b"."
        os.kill(child, signal.SIGSTOP)
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            if wires.Lost(1) in made.wait(1.0):
                return True
        return False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        made.close()
        wires.HEARTBEAT, wires.SILENCE = usual


def test_a_process_that_falls_silent_is_lost(ranks: Ranks) -> None:
    assert ranks(1).run(_falls_silent) == [True]


def _references(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class _Page:
    """Reads into a page. Implements `Reader`."""

    def __init__(self, elements: int) -> None:
        self.page = torch.zeros(elements)
        self.changed = threading.Condition()
        self.delivered: list[Message] = []
        self.references: list[int] = []

    def destination(self, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
        return [self.page[:]] if isinstance(message, ShardData) else None

    def deliver(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None:
        self.delivered.append(message)
        self.references.append(_references(self.page) - len(data))


@pytest.mark.parametrize("elements", (8, LARGE))
def test_memory_is_let_go_of_when_it_is_delivered(elements: int) -> None:
    """Who is told that a page is there counts the references to it."""
    reader = _Page(elements)
    before = _references(reader.page)
    arrivals = Arrivals(1, reader)
    head, part = pieces(ShardData(0, 0), [torch.ones(elements)])
    if elements == LARGE:
        arrivals.take_message(head)
        arrivals.take_chunk(part[: len(part) // 2])
        arrivals.take_chunk(part[len(part) // 2 :])
    else:
        arrivals.take_message(memoryview(bytes(head) + bytes(part)))
    assert torch.equal(reader.page, torch.ones(elements)) and reader.references == [before]
    assert _references(reader.page) == before


def test_what_comes_apart_keeps_its_place() -> None:
    """Bytes may come before their message, or after messages that were sent after it."""
    reader, first, second = _Page(LARGE), torch.rand(LARGE), torch.rand(LARGE)
    arrivals = Arrivals(1, reader)
    envelopes = [(ShardData(0, unit), pieces(ShardData(0, unit), [data])) for unit, data in enumerate((first, second))]
    arrivals.take_chunk(envelopes[0][1][1])
    assert reader.delivered == []
    arrivals.take_message(envelopes[0][1][0])
    assert reader.delivered == [ShardData(0, 0)] and torch.equal(reader.page, first)
    arrivals.take_message(envelopes[1][1][0])
    arrivals.take_message(pieces(Goodbye())[0])
    assert reader.delivered == [ShardData(0, 0)]
    arrivals.take_chunk(envelopes[1][1][1])
    assert reader.delivered == [ShardData(0, 0), ShardData(0, 1), Goodbye()] and torch.equal(reader.page, second)


def test_more_bytes_than_were_announced_are_refused() -> None:
    arrivals = Arrivals(1, _Page(LARGE))
    head, part = pieces(ShardData(0, 0), [torch.ones(LARGE)])
    arrivals.take_message(head)
    arrivals.take_chunk(part[8:])
    with pytest.raises(MessageError, match="16 bytes of tensors came where 8 were to come"):
        arrivals.take_chunk(part[:16])


class _Alone:
    """Connections to nobody."""

    rank, world, peers, departed = 0, 2, (1,), frozenset[int]()

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: list[Message] = []

    def name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def attach(self, receiver: OneSidedTransport) -> None:
        pass

    def notify(self) -> None:
        self.changed.notify_all()

    def wait_until(self, over: Callable[[], bool], timeout: float, look_again: float | None = None) -> None:
        self.changed.wait_for(over, timeout)

    def tell(self, dst: int, message: Message, data: Any = ()) -> None:
        self.send(dst, message, data)

    def send(self, dst: int, message: Message, data: Any = ()) -> Any:
        self.sent.append(message)


def _hears(transport: OneSidedTransport, src: int, message: Message, *data: torch.Tensor) -> None:
    with transport.connections.changed:
        transport.on_message(src, message, data)


def test_a_rank_that_has_left_is_missed_only_if_it_owes_something() -> None:
    transport = OneSidedTransport(_Alone(), Shards(2), 0.1)  # type: ignore[arg-type]
    transport.on_lost("the connection to rank 1 was lost", ConnectionResetError())
    key = Key(0, 0, 0, 2)
    _hears(transport, 1, Put(0, key, torch.float32), torch.ones(2))
    assert torch.equal(transport.take(key, 1, "a unit"), torch.ones(2))
    with pytest.raises(rg.DivergenceError, match="rank 0: the connection to rank 1 was lost"):
        transport.take(key, 1, "a unit")


def test_a_rank_that_gave_up_is_heard_whatever_it_owes() -> None:
    transport = OneSidedTransport(_Alone(), Shards(2), 0.1)  # type: ignore[arg-type]
    key = Key(0, 0, 0, 2)
    _hears(transport, 1, Put(0, key, torch.float32), torch.ones(2))
    _hears(transport, 1, Fail(0, "rank 1 waited in vain"))
    with pytest.raises(rg.DivergenceError, match="rank 1 waited in vain"):
        transport.take(key, 1, "a unit")


class Stumbling(OneSidedTransport):
    def on_message(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None:
        raise ValueError("stumbled")


def _stumbles(rank: int, world: int) -> str:
    """A service thread that cannot go on says so to those who wait for it."""
    transport = (Stumbling if rank else OneSidedTransport)(Connections.of(dist.new_group()), Shards(2), 600.0)
    dist.barrier()
    said = ""
    if rank == 0:
        transport.put(Key(0, 0, 0, 2), {1: [torch.ones(2)]})
    else:
        with pytest.raises(rg.DivergenceError) as caught:
            transport.take(Key(0, 0, 0, 2), 0, "a unit")
        said = f"{caught.value} because of {caught.value.__cause__!r}"
    dist.barrier()
    return said


def test_an_error_in_the_service_thread_is_told(ranks: Ranks) -> None:
    said = ranks(2).run(_stumbles)[1]
    told = "rank 1: the connection to rank 0 was closed by rank 1, which could not take what came from there: "
    assert said == told + "ValueError: stumbled because of ValueError('stumbled')"


def test_what_nobody_took_is_dropped_at_a_step() -> None:
    transport = OneSidedTransport(_Alone(), Shards(2), 0.1)  # type: ignore[arg-type]
    early, late = Key(0, 1, 0, 2), Key(0, 2, 0, 2)
    for key in (early, late):
        _hears(transport, 1, Put(0, key, torch.float32), torch.ones(2))
    transport.meetings = 2
    transport.discard_parts()
    assert not transport.arrived(early, 1) and transport.arrived(late, 1)


def _trains_with_delays(rank: int, world: int, seed: int) -> None:
    with delayed(100 * seed + rank):
        twin = Twin(rank, world, 3, timeout=30.0)
        twin.optimize()
        for step in range(3):
            twin.train(step)
        twin.check_weights()
        dist.barrier()


@pytest.mark.parametrize("seed", range(3))
def test_messages_may_take_their_time(ranks: Ranks, seed: int) -> None:
    ranks(4).run(_trains_with_delays, seed, timeout=90.0)


def test_addresses_follow_the_store() -> None:
    assert connecting.own_address(SimpleNamespace()) in ("127.0.0.1", "::1")  # type: ignore[arg-type]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert connecting.own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"


def test_a_host_is_known_where_there_is_a_kernel_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connecting.host() == connecting.host()
    monkeypatch.setattr(connecting, "Path", lambda name: Path("/nowhere"))
    assert connecting.host() != connecting.host()
