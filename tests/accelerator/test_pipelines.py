"""Pipelines on the device: exact in every order of execution, without a race and without a host that waits."""

from __future__ import annotations

import pytest

from tests.accelerator import pipelines
from tests.harness import Ranks

WORLD = 2
LIMIT = 100.0  # seconds
MODES = pytest.mark.parametrize(("mode", "seed"), (("lazy", 0), ("sides", 0), ("random", 1)))
SCHEDULES = ("1f1b", "zb-h1", "zb-v")


@MODES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transformer(late_ranks: Ranks, schedule: str, mode: str, seed: int) -> None:
    found = late_ranks(WORLD).run(pipelines.steps, schedule, ["transformer"], mode, seed, timeout=LIMIT)
    assert found == [[]] * WORLD
