"""Offload on the device: the CPU's numbers, without a race; what is where, and how often the host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator.offloading import Way, train_late, train_on_cpu
from tests.harness import Ranks
from tests.stages import EACH_STAGE

WORLD = 2
OFFLOADS = pytest.mark.parametrize("offload", ("optimizer", "parameters"))
MODES = pytest.mark.parametrize(("mode", "seed"), (("lazy", 0), ("sides", 0), ("random", 1)))
ONCE = {"Event.synchronize": 1}


def check(ranks: Ranks, stage: int, mode: str, seed: int, way: Way, **options: Any) -> list[dict[str, int]]:
    """Trained with AdamW, it is what it is on the CPU. Returns how often the host waited, step by step."""
    pool = ranks(WORLD)
    want = pool.run(train_on_cpu, stage, way)
    got = pool.run(train_late, stage, mode, seed, way, **options)
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine.values) == len(theirs.values) > 0
        assert all(map(torch.equal, mine.values, theirs.values))
    assert got[0].waits == got[1].waits
    return got[0].waits


@EACH_STAGE
@OFFLOADS
@MODES
def test_training(late_ranks: Ranks, stage: int, offload: str, mode: str, seed: int) -> None:
    """The host waits once in a step: for gradients, when their norm is computed."""
    assert check(late_ranks, stage, mode, seed, Way(), offload=offload) == [ONCE] * 3


@EACH_STAGE
@OFFLOADS
@pytest.mark.parametrize("backwards", (2, 4, 8))
def test_windows(late_ranks: Ranks, stage: int, offload: str, backwards: int) -> None:
    """What waits stays on the device, so that nothing but its sum crosses, at the window's end or at the step."""
    for window in ("coalesce", "no_sync"):
        way = Way(backwards, window)
        assert check(late_ranks, stage, "lazy", 0, way, offload=offload) == [ONCE] * 3


@pytest.mark.parametrize("backwards", (2, 4))
def test_a_backward_that_adds_to_gradients_is_waited_for(late_ranks: Ranks, backwards: int) -> None:
    """Once for all of its units. At stage 1 gradients wait for the step anyway."""
    for stage, waits in ((1, 1), (2, backwards - 1), (3, backwards - 1)):
        found = check(late_ranks, stage, "lazy", 0, Way(backwards), offload="parameters")
        assert found == [{"Event.synchronize": waits}] * 3
