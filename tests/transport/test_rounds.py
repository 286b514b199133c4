"""Meetings of many ranks: everybody hears everybody, in few messages, and a rank that does not come is named."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from retrograde.errors import DivergenceError
from retrograde.transport import Position, Reason
from retrograde.transport.connections import Connections
from retrograde.transport.messages import Meet, Message
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.rounds import rounds
from retrograde.transport.wires import Wires
from tests.transport.shards import Shards

MANY = 20  # ranks: two rounds, of which the second is not full


@pytest.mark.parametrize("world", (1, 2, 3, 15, 16, 17, 31, 40, 255, 256, 257, 300))
def test_everybody_hears_everybody(world: int) -> None:
    """Each rank's words come to each other rank once, nearest first."""
    parts = [rounds(rank, world) for rank in range(world)]
    known = [[rank] for rank in range(world)]
    for number in range(len(parts[0])):
        before = [list(each) for each in known]
        for rank in range(world):
            for src, count in parts[rank][number].hears:
                told = {words.rank: words.number for words in parts[src][number].tells}
                assert told[rank] == count
                known[rank] += before[src][:count]
    assert known == [[(rank - distance) % world for distance in range(world)] for rank in range(world)]


@pytest.mark.parametrize("world", (8, 16, 64, 512, 4096, 16384))
def test_messages_grow_as_the_logarithm(world: int) -> None:
    parts = rounds(0, world)
    assert len(parts) == math.ceil(math.log(world, 16) - 1e-9)
    assert all(len(each.tells) <= 15 for each in parts)
    told = [words.rank for each in parts for words in each.tells]
    assert len(told) == len(set(told)), "a rank tells another once"


@contextlib.contextmanager
def _connected(world: int, timeout: float) -> Iterator[list[OneSidedTransport]]:
    """Ranks that are connected, all in this process."""
    wires = [Wires(rank, None) for rank in range(world)]
    for rank, mine in enumerate(wires):
        mine.admit({peer: wires[peer].contact for peer in range(world) if peer != rank})
    connections = [Connections(rank, world, mine) for rank, mine in enumerate(wires)]
    try:
        yield [OneSidedTransport(each, Shards(), timeout) for each in connections]
    finally:
        for each in connections:
            each.say_goodbye()
        for each in connections:
            assert each.wait_for_goodbyes() is None


def _each(transports: list[OneSidedTransport], program: Callable[[OneSidedTransport], None]) -> None:
    threads = [threading.Thread(target=program, args=(each,), daemon=True) for each in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.timeout(120)
def test_a_meeting_in_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several meetings in a row, with tensors; counted."""
    sent: Counter[int] = Counter()
    send = Connections.send

    def counting(self: Connections, dst: int, message: Message, data: object = ()) -> object:
        sent[self.rank] += isinstance(message, Meet)
        return send(self, dst, message, data)  # type: ignore[arg-type]

    monkeypatch.setattr(Connections, "send", counting)
    wrong: list[str] = []

    def meet(transport: OneSidedTransport) -> None:
        for turn in range(3):
            mine = [float(turn), torch.full((transport.rank + turn,), float(transport.rank)), str(transport.rank)]
            positions = transport.meet(Position(Reason.VALUE, f"turn {turn}", {}, {}, mine))
            for rank, position in enumerate(positions):
                number, tensor, text = position.value  # type: ignore[misc]
                right = torch.equal(tensor, torch.full((rank + turn,), float(rank)))  # type: ignore[arg-type]
                if not right or (number, text, position.label) != (turn, str(rank), f"turn {turn}"):
                    wrong.append(f"rank {transport.rank} heard {position} of rank {rank}")

    with _connected(MANY, timeout=30.0) as transports:
        _each(transports, meet)
    assert wrong == []
    assert sent == dict.fromkeys(range(MANY), 3 * (15 + 1))


@pytest.mark.timeout(120)
def test_a_rank_that_does_not_come_is_named() -> None:
    """Also by those who wait for a rank that waits for it."""
    texts: list[str] = []

    def meet(transport: OneSidedTransport) -> None:
        if transport.rank == 5:
            return
        with pytest.raises(DivergenceError) as caught:
            transport.meet(Position(Reason.STEP, "SGD", {}, {}))
        texts.append(str(caught.value))

    with _connected(MANY, timeout=2.0) as transports:
        _each(transports, meet)
    assert len(texts) == MANY - 1
    for text in texts:
        assert re.search(r"(rank 5 is not started|waiting for rank\(s\) .*\b5\b)", text), text
