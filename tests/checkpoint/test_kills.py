"""A dozen kills during saves. Hundreds: `python -m tests.checkpoint.kills --count 200`."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.kills import model_at, run, wrong_values


def test_a_dozen_kills(tmp_path: Path) -> None:
    outcome = run(12, 1, tmp_path)
    assert outcome.faults == []
    assert outcome.kills == 12
    assert outcome.saved > 0


def test_a_mixture_of_steps_is_found() -> None:
    model, optimizer = model_at(3)
    assert wrong_values(model, optimizer, 3) == []
    assert len(wrong_values(model, optimizer, 4)) == 12
