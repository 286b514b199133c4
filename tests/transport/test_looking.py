"""How long a rank that waits for what nobody tells, as that a call of a backend is done, sleeps between two looks."""

from __future__ import annotations

import os
import threading

import pytest

from retrograde.transport.connections import Connections


class _Asleep(threading.Condition):
    """Notes for how long somebody would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.slept.append(timeout)
        return False


@pytest.mark.parametrize(
    ("ranks", "cores", "look_again", "pause"),
    (
        (2, 2, 0.0002, 0.0002),
        (2, 64, 0.0002, 0.0002),
        (32, 2, 0.0002, 0.0032),  # 16 ranks on a core
        (64, None, 0.0002, 0.01),  # never longer than that
        (64, 2, 0.5, 0.5),  # unless that is asked for
    ),
)
def test_the_pause_between_two_looks(
    ranks: int, cores: int | None, look_again: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    connections = Connections(0, ranks, None)
    connections.changed = asleep = _Asleep()
    with asleep:
        connections.wait_until(lambda: len(asleep.slept) == 3, 60.0, look_again)
    assert asleep.slept == pytest.approx([pause] * 3)


def test_what_is_told_is_not_looked_at() -> None:
    connections = Connections(0, 64, None)
    connections.changed = asleep = _Asleep()
    with asleep:
        connections.wait_until(lambda: bool(asleep.slept), 60.0)
    assert asleep.slept == [pytest.approx(60, abs=1)]
