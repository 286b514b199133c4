"""How often a thread that waits looks again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from retrograde.transport import pauses
from retrograde.transport.pauses import Pauses


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Clock]:
    clock = _Clock()
    monkeypatch.setattr(pauses, "time", clock)
    yield clock


def _looks(clock: _Clock, timeout: float, look_again: float | None) -> list[float]:
    """When a wait looks that ends by its time-out, in milliseconds from its beginning."""
    began, looks = clock.now, []
    waiting = Pauses(timeout, look_again)
    while (seconds := waiting.next()) > 0:
        clock.now += max(seconds, 1e-9)  # a clock has ticks
        looks.append(1000 * (clock.now - began))
    return looks


def test_a_wait_of_which_all_is_told_sleeps_to_its_end(clock: _Clock) -> None:
    assert _looks(clock, 30.0, None) == pytest.approx([30_000])


def test_pauses_grow_with_the_wait(clock: _Clock) -> None:
    looks = _looks(clock, 0.1, 0.0002)
    assert looks[:3] == pytest.approx([0.2, 0.4, 0.6]), "what is quick is seen at once"
    assert all(later - look <= max(0.2, look / 16) + 1e-6 for look, later in pairwise(looks))
    assert len(looks) < 100, "every 0.2 ms would be 500"


def test_no_pause_is_long(clock: _Clock) -> None:
    looks = _looks(clock, 10.0, 0.0002)
    assert max(later - look for look, later in pairwise(looks)) == pytest.approx(10)
    assert looks[-1] == pytest.approx(10_000), "the last pause ends with the time"


def test_pauses_that_are_asked_for_are_no_shorter(clock: _Clock) -> None:
    assert _looks(clock, 0.1, 0.04)[:3] == pytest.approx([40, 80, 100])
