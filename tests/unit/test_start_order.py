"""The order in which ranks start collectives: what rank 0 decides, and that all ranks know of it."""

from __future__ import annotations

import itertools

from retrograde.transport import Key
from retrograde.transport.collectives import StartOrder

A, B = Key(0, 0, 0, 2), Key(1, 0, 0, 2)
LATER = Key(0, 1, 0, 2)


def test_all_must_be_ready() -> None:
    order = StartOrder(3)
    assert order.ready(A, 0, 0) == [] and order.ready(A, 2, 0) == []
    assert order.ready(A, 1, 0) == [A]


def test_whoever_is_last_decides_the_order() -> None:
    for ranks in itertools.permutations(range(2)):
        order = StartOrder(2)
        started = []
        for key, rank in ((A, ranks[0]), (B, ranks[0]), (B, ranks[1]), (A, ranks[1])):
            started += order.ready(key, rank, 0)
        assert started == [B, A]


def test_saying_it_twice_is_saying_it_once() -> None:
    order = StartOrder(2)
    assert order.ready(A, 1, 0) == [] and order.ready(A, 1, 0) == []


def test_nothing_from_before_a_meeting_starts_after_it_was_counted() -> None:
    order = StartOrder(2)
    order.ready(A, 0, 0)
    assert order.ready(A, 1, 1) == []
    assert order.ready(A, 0, 1) == []


def test_what_is_for_after_the_meeting_may_come_before_its_end() -> None:
    """Another rank has left the meeting already."""
    order = StartOrder(2)
    assert order.ready(LATER, 1, 1) == []
    assert order.ready(LATER, 0, 1) == [LATER]


def test_started_ones_are_taken_once_and_in_order() -> None:
    order = StartOrder(2)
    for key in (B, A):
        order.start(key)
    assert order.take_started() == [B, A] and order.take_started() == []
