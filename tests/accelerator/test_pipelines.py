"""Pipelines on the device: exact in every order of execution, without a race and without a host that waits."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import pipelines
from tests.accelerator.ranks import LateSeat
from tests.endings import run_to_the_end
from tests.harness import Ranks
from tests.stages import EACH_STAGE

WORLD = 2
LIMIT = 100.0  # seconds
MODES = pytest.mark.parametrize(("mode", "seed"), (("lazy", 0), ("sides", 0), ("random", 1)))
SCHEDULES = ("1f1b", "zb-h1", "zb-v")


@MODES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transformer(late_ranks: Ranks, schedule: str, mode: str, seed: int) -> None:
    found = late_ranks(WORLD).run(pipelines.steps, schedule, ["transformer"], mode, seed, timeout=LIMIT)
    assert found == [[]] * WORLD


@pytest.mark.parametrize(("schedule", "mode"), (("1f1b", "sides"), ("zb-h1", "random"), ("zb-v", "lazy")))
def test_kinds_of_models(late_ranks: Ranks, schedule: str, mode: str) -> None:
    """What travels: trees, tensors with gaps, without elements, without a gradient; what is written in place."""
    names = ["trees", "in place", "views", "outputs without gradient", "empty tensor", "uneven microbatches"]
    found = late_ranks(WORLD).run(pipelines.steps, schedule, [*names, "checkpoint"], mode, 1, timeout=LIMIT)
    assert found == [[]] * WORLD


@pytest.mark.parametrize("mistake", pipelines.MISTAKES)
def test_what_the_channel_may_not_forget(late_ranks: Ranks, mistake: str) -> None:
    found = late_ranks(WORLD).run(pipelines.races_without, mistake, timeout=LIMIT)
    assert [bool(races) for races in found] == [mistake != "nothing"] * WORLD


@MODES
def test_a_message_of_all_sorts(late_ranks: Ranks, mode: str, seed: int) -> None:
    _, (turned, gaps, none, host, empty, lower, waits) = late_ranks(2).run(pipelines.mixed_message, mode, seed)
    grid = torch.arange(12.0).view(3, 4)
    assert turned[:2] == ("late:1", (1, 4)) and torch.equal(turned[2], grid.t())
    assert gaps[:2] == ("late:1", (2, 1)) and torch.equal(gaps[2], grid[:, ::2])
    assert none is None and host[0] == "cpu" and host[2].tolist() == [0, 1, 2]
    assert empty[2].shape == (0, 4) and torch.equal(lower[2], grid.bfloat16())
    assert waits == {}


@EACH_STAGE
def test_zero(late_ranks: Ranks, stage: int) -> None:
    assert late_ranks(4).run(pipelines.zero_steps, "zb-h1", stage, "lazy", timeout=LIMIT) == [[]] * 4


@pytest.mark.parametrize(("schedule", "mode"), (("1f1b", "lazy"), ("zb-v", "sides")))
def test_after_a_failure_the_next_step_is_clean(late_ranks: Ranks, schedule: str, mode: str) -> None:
    first, second = late_ranks(WORLD).run(pipelines.fail_then_recover, schedule, mode, timeout=LIMIT)
    assert first == second and first[1] == []
    assert "action" in first[0] and "ValueError: a trap" in first[0]


def test_a_rank_that_dies_is_named(late_ranks: Ranks) -> None:
    """`late_ranks`: the device is built when the time limit begins."""
    endings = run_to_the_end(pipelines.step_with_a_death, WORLD, timeout=LIMIT, seat=LateSeat)
    assert [ending.code for ending in endings] == [0, 7], [(ending.said, ending.stderr) for ending in endings]


@pytest.mark.parametrize("mode", ("lazy", "sides"))
def test_tied_parameters(late_ranks: Ranks, mode: str) -> None:
    """The host waits for what it puts and for what it takes: a gradient on one rank, the sum on the other."""
    waits = {"Event.synchronize": 1, "copy from the host": 1}
    assert late_ranks(WORLD).run(pipelines.tied_steps, mode, timeout=LIMIT) == [([], waits)] * WORLD


def test_what_is_computed_again_has_the_same_random_numbers(late_ranks: Ranks) -> None:
    """The second stage repeats all four microbatches. Each W sets the state of its F, and then the one it found."""
    first, second = late_ranks(WORLD).run(pipelines.random_states, timeout=LIMIT)
    assert first == ([], [])
    assert second == ([0, 2, 1, 4, 3, 6, 5, 7], [])
