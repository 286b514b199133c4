"""Messages of a pipeline between ranks of one host: by shared memory, in turn, whatever way each of them takes."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from retrograde.devices import streams_of
from retrograde.transport.connections import Connections
from retrograde.transport.mapped.channel import MappedChannel
from retrograde.transport.messages import Address, Content, Form, Lent, TensorLayout
from retrograde.transport.processes import ProcessRanks
from retrograde.transport.protocol import Parts
from tests.harness import Ranks

HOST = torch.device("cpu")
ADDRESS = Address(True, 0, 0)
PATIENCE = 20.0


def _content(*tensors: torch.Tensor) -> Parts:
    layouts = tuple(TensorLayout(tuple(each.shape), each.stride(), each.dtype, False) for each in tensors)
    return Parts(Form(layouts, None), list(tensors))


def _numbered(number: int, numel: int) -> Parts:
    """Other layouts from one to the next, so that one is never taken for another."""
    return _content(torch.full((numel + number % 3,), number, dtype=torch.int64), torch.tensor(number % 2 == 0))


def _channel(monkeypatch: pytest.MonkeyPatch) -> tuple[MappedChannel, list[str]]:
    """A channel, and what was sent by it: the names of messages."""
    ranks = ProcessRanks(dist.group.WORLD)
    channel = ranks.channel(streams_of(HOST), PATIENCE, [])
    assert isinstance(channel, MappedChannel)
    _wait_for_neighbours(channel)
    sent: list[str] = []
    post, send = Connections.post, Connections.send
    monkeypatch.setattr(
        Connections, "post", lambda self, dst, message, data=(): _noted(sent, message, post(self, dst, message, data))
    )
    monkeypatch.setattr(
        Connections, "send", lambda self, dst, message, data=(): _noted(sent, message, send(self, dst, message, data))
    )
    return channel, sent


def _wait_for_neighbours(channel: MappedChannel) -> None:
    """Ranks find each other's memory when their connections are made; until then messages go over these."""
    neighbours = channel._neighbours
    deadline = time.monotonic() + PATIENCE
    while not (neighbours.found and neighbours.found_by):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _noted(sent: list[str], message: object, result: object) -> object:
    if result is not False and isinstance(message, Content | Lent):
        sent.append(type(message).__name__)
    return result


def _exchanged(rank: int, world: int, numel: int, room: list[bool]) -> tuple[list[str], list[str]]:
    """Rank 0 sends one message after the other to one address; the box has room for those of `room`."""
    with pytest.MonkeyPatch.context() as patch:
        channel, sent = _channel(patch)
        dist.barrier()
        if rank == 0:
            _send_all(channel, patch, numel, room)
        dist.barrier()  # all are on their way, by two ways
        wrong = []
        if rank == 1:
            for number in range(len(room)):
                came = channel.receive(0, ADDRESS).wait(streams_of(HOST).current())
                assert came is not None
                wanted = _numbered(number, numel)
                same = [torch.equal(one, other) for one, other in zip(came.tensors, wanted.tensors, strict=True)]
                wrong += [] if all(same) else [f"message {number} is {came.tensors}"]
        dist.barrier()
        return sent, wrong


def _send_all(channel: MappedChannel, patch: pytest.MonkeyPatch, numel: int, room: list[bool]) -> None:
    by_letter = Connections.post
    for number, has_room in enumerate(room):
        patch.setattr(Connections, "post", by_letter if has_room else lambda *_, **__: False)
        channel.send(1, ADDRESS, _numbered(number, numel))
    patch.setattr(Connections, "post", by_letter)


@pytest.mark.parametrize("numel", (0, 3, 10_000, 300_000))
def test_by_shared_memory(ranks: Ranks, numel: int) -> None:
    sent, others = ranks(2).run(_exchanged, numel, [True] * 8)
    assert sent == (["Lent"] * 8, []) and others == ([], [])


@pytest.mark.parametrize("numel", (3, 10_000))
def test_in_turn_where_the_box_is_full(ranks: Ranks, numel: int) -> None:
    """What goes by the connection takes longer than letters that were sent after it."""
    room = [True, False, True, True, False, False, True, False]
    sent, others = ranks(2).run(_exchanged, numel, room)
    assert sent == (["Lent" if each else "Content" for each in room], [])
    assert others == ([], [])


def _without_memory(rank: int, world: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        channel, sent = _channel(patch)
        patch.setattr(channel._neighbours, "parcel", lambda pieces, receiver: None)
        dist.barrier()
        if rank == 0:
            channel.send(1, ADDRESS, _numbered(7, 100))
        else:
            came = channel.receive(0, ADDRESS).wait(streams_of(HOST).current())
            assert came is not None and torch.equal(came.tensors[0], _numbered(7, 100).tensors[0])
        dist.barrier()
        return sent


def test_without_shared_memory(ranks: Ranks) -> None:
    assert ranks(2).run(_without_memory) == [["Content"], []]


def _parcels(rank: int, world: int) -> int:
    """How many parcels wait after a hundred messages that were all taken."""
    ranks = ProcessRanks(dist.group.WORLD)
    channel = ranks.channel(streams_of(HOST), PATIENCE, [])
    assert isinstance(channel, MappedChannel)
    for number in range(100):
        if rank == 0:
            channel.send(1, ADDRESS, _numbered(number, 1000))
        else:
            channel.receive(0, ADDRESS).wait(streams_of(HOST).current())
        dist.barrier()
    channel._neighbours.parcels.collect()
    return len(channel._neighbours.parcels._out)


def test_memory_is_used_again(ranks: Ranks) -> None:
    assert ranks(2).run(_parcels) == [0, 0]
