"""What the pager expects next. Units are letters here: a forecast only compares them."""

from __future__ import annotations

from typing import Any

import pytest

from retrograde.pages.forecast import Forecast

FORWARD, BACKWARD = "abcd", "dcba"


def _play(forecast: Any, uses: str, backward: bool = False) -> None:
    for unit in uses:
        forecast.use(unit, backward)


def _step(forecast: Any, forward: str = FORWARD, backward: str = BACKWARD) -> None:
    _play(forecast, forward)
    _play(forecast, backward, backward=True)
    forecast.break_off()


def _ahead(forecast: Any, limit: int = 100) -> str:
    return "".join(forecast.ahead(limit))


def test_knows_nothing_at_first() -> None:
    forecast: Any = Forecast()
    assert _ahead(forecast) == ""
    _play(forecast, "abc")
    assert _ahead(forecast) == ""


def test_learns_a_step_in_one_pass() -> None:
    forecast: Any = Forecast()
    _step(forecast)
    forecast.use("a", False)
    assert _ahead(forecast) == "bcddcba"
    assert _ahead(forecast, 2) == "bc"
    _play(forecast, "bcd")
    assert _ahead(forecast) == "dcba"
    _play(forecast, "dc", backward=True)
    assert _ahead(forecast) == "ba"


def test_stops_where_a_step_may_come() -> None:
    """After a backward comes a step or another forward: neither is fetched ahead."""
    forecast: Any = Forecast()
    for _ in range(3):  # no step in between: micro-batches
        _play(forecast, FORWARD)
        _play(forecast, BACKWARD, backward=True)
    assert _ahead(forecast) == ""
    _play(forecast, "a")
    assert _ahead(forecast)[:3] == "bcd"


def test_a_step_forgets_the_position_not_the_order() -> None:
    forecast: Any = Forecast()
    _step(forecast)
    assert _ahead(forecast) == ""
    forecast.use("a", False)
    assert _ahead(forecast, 3) == "bcd"


def test_learns_another_order_at_once() -> None:
    forecast: Any = Forecast()
    _step(forecast)
    _step(forecast, "acbd", "dbca")
    forecast.use("a", False)
    assert _ahead(forecast) == "cbddbca"


def test_a_detour_teaches_nothing() -> None:
    """What was expected before the step is expected after it, and what nobody expected nobody does."""
    forecast: Any = Forecast()
    _step(forecast)
    forecast.end_step(learned=True)
    _step(forecast, "acbd", "dbxca")
    forecast.end_step(learned=False)
    forecast.use("a", False)
    assert _ahead(forecast) == "bcddcba"
    forecast.break_off()
    _step(forecast, "acbd", "dbca")
    forecast.end_step(learned=True)
    forecast.use("a", False)
    assert _ahead(forecast) == "cbddbca"


def test_forward_and_backward_are_apart() -> None:
    """The root at both ends, and a unit whose neighbours are the same in both directions."""
    forecast: Any = Forecast()
    _step(forecast, "rabar", "rabar")
    forecast.use("r", False)
    assert _ahead(forecast, 4) == "abar"
    _play(forecast, "a")
    assert _ahead(forecast, 1) == "b"
    _play(forecast, "ba")
    assert _ahead(forecast, 1) == "r", "the second visit of a unit is another place"


@pytest.mark.parametrize("limit", (0, 1, 256))
def test_a_cycle_ends_at_the_limit(limit: int) -> None:
    forecast: Any = Forecast()
    _play(forecast, "abababab")
    assert len(_ahead(forecast, limit)) == limit
