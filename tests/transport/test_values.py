"""Values that all ranks bring to one meeting."""

from __future__ import annotations

import pytest

import retrograde as rg
from retrograde.devices import HOST, streams_of
from retrograde.transport import ThreadRanks
from retrograde.transport.values import exchange
from tests import threads
from tests.transport.shards import Shards


def test_everybody_gets_everybodys() -> None:
    def program(ranks: ThreadRanks) -> list[int]:
        transport = ranks.transport(Shards(1), streams_of(HOST), 10.0)
        return exchange(transport, "a number", ranks.rank)

    assert threads.run(3, program) == [[0, 1, 2]] * 3


def test_ranks_that_came_for_something_else_are_named() -> None:
    """As where one rank calls `shard()` and another `Pipeline()`."""

    def program(ranks: ThreadRanks) -> str:
        transport = ranks.transport(Shards(1), streams_of(HOST), 10.0)
        with pytest.raises(rg.DivergenceError) as caught:
            exchange(transport, f"the value of rank {ranks.rank}", None)
        return str(caught.value)

    for text in threads.run(2, program):
        assert "ranks cannot be reconciled: rank 0 is at" in text
        assert "(the value of rank 0); rank 1 is at" in text and "(the value of rank 1)" in text
