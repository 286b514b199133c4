"""What the window benchmark makes of what it has measured, and of what earlier runs have, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.crew import CrewError
from benchmarks.window import Windows, grids, notes, tables
from benchmarks.window_rank import SMOKE, Case, Manner, Seen

EACH = Case(Manner.EACH, 2)
TOGETHER = Case(Manner.COALESCED, 2)


def _windows(engine: str, seconds: float = 1.0, setting: str = "a setting") -> Windows:
    seen = Seen(waiting=2**20, peak=2**21, after=0, sent=2**22, calls={}, exchanges={"reduce": 4, "agree": 9})
    return Windows(
        setting,
        SMOKE,
        seconds={engine: {EACH: [2 * seconds, 4 * seconds], TOGETHER: [seconds, seconds]}},
        seen={engine: {EACH: seen, TOGETHER: seen}},
        other_load={engine: [0.25]},
    )


def test_a_ratio_is_between_steps_of_one_round() -> None:
    (grid,) = grids(_windows("retrograde-2"))
    assert grid.rows == [
        ("2", "each", "4 reduce", "4", "1", "2", "0", "3.00", "1.00"),
        ("2", "coalesced", "4 reduce", "4", "1", "2", "0", "1.00", "0.38 (0.25 to 0.50)"),
    ]


def test_parts_give_the_tables_of_the_whole(tmp_path: Path) -> None:
    """What an earlier run has of an engine that was measured again is left out."""
    earlier = tmp_path / "latest-window.md"
    first = _windows("retrograde-3", seconds=5.0)
    first.absent = ["deepspeed-1", "retrograde-2"]
    tables(first).write(earlier)
    second = _windows("retrograde-2")
    second.add(earlier.with_suffix(".json"))
    tables(second).write(earlier)
    third = _windows("retrograde-3")
    third.add(earlier.with_suffix(".json"))
    alone = [*grids(_windows("retrograde-2")), *grids(_windows("retrograde-3"))]
    assert grids(third) == alone
    assert notes(third)[-2:] == [
        "Others used 25% of the machine in a median step: not a quiet machine, do not trust these figures.",
        "Not installed, or failed: deepspeed-1.",
    ]


def test_what_was_measured_elsewhere_is_not_added(tmp_path: Path) -> None:
    earlier = tmp_path / "latest-window.md"
    tables(_windows("retrograde-2", setting="another machine")).write(earlier)
    with pytest.raises(CrewError, match="is of another setting: another machine"):
        _windows("retrograde-3").add(earlier.with_suffix(".json"))
