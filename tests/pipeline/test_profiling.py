"""A profile of a step names what each rank did: the action, its stage and its microbatch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import retrograde as rg
from retrograde.labels import PREFIX
from retrograde.pipeline import Schedule, generate, lower
from retrograde.pipeline.executor import label_of
from tests.harness import RankPool
from tests.pipeline.cases import WIDTH, tanhs

Ranks = Callable[[int], RankPool]
MICROBATCHES = 2


def labels_of_a_step(rank: int, world: int, schedule: str) -> list[str]:
    """What carries our prefix in a profile of the second step, in the order in which it began."""
    torch.manual_seed(0)
    pipe = rg.Pipeline(tanhs(4), schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    x = torch.randn(4, WIDTH)
    pipe.step(x, target=x)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        pipe.step(x, target=x)
    ours = [event for event in recorded.events() if event.name.startswith(PREFIX)]
    return [event.name for event in sorted(ours, key=lambda event: event.time_range.start)]


def expected(schedule: Schedule, rank: int) -> list[str]:
    return [label_of(action) for action in schedule.ranks[rank]]


@pytest.mark.parametrize("name", ("1f1b", "zb-h1", "zb-v"))
def test_a_profile_has_the_actions_of_a_rank_in_order(ranks: Ranks, name: str) -> None:
    schedule = lower(generate(name, 2, MICROBATCHES))
    for rank, found in enumerate(ranks(2).run(labels_of_a_step, name, timeout=60)):
        waits = [label for label in found if label.startswith(f"{PREFIX}wait for the ")]
        assert [label for label in found if label not in waits] == expected(schedule, rank)
        received = [label for label in expected(schedule, rank) if label.startswith(f"{PREFIX}receive ")]
        assert len(waits) == len(received), "what is received is waited for, once"


def labels_without_a_profile(rank: int, world: int, schedule: str) -> list[str]:
    """What torch is asked to show in a step that nobody records."""
    asked: list[str] = []
    original = torch.profiler.record_function

    def counted(name: str) -> object:
        asked.append(name)
        return original(name)

    pipe = rg.Pipeline(tanhs(4), schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    x = torch.randn(4, WIDTH)
    torch.profiler.record_function = counted  # type: ignore[assignment, misc]
    try:
        pipe.step(x, target=x)
        unseen = len(asked)
        with profile(activities=[ProfilerActivity.CPU]):
            pipe.step(x, target=x)
    finally:
        torch.profiler.record_function = original  # type: ignore[misc]
    assert len(asked) > unseen, "what is counted is what a profile shows"
    return asked[:unseen]


def test_labels_cost_nothing_where_nobody_looks(ranks: Ranks) -> None:
    assert ranks(2).run(labels_without_a_profile, "zb-h1", timeout=60) == [[], []]


def test_labels() -> None:
    text = "schedule mine microbatches=1 placement=0,1\nrank 0: 0F0 0SEND_F0 0I0 0W0 0REDUCE\nrank 1: 1GATHER 1B0\n"
    schedule = Schedule.parse(text)
    assert expected(schedule, 0) == [
        "retrograde: forward, stage 0, microbatch 0",
        "retrograde: send output, stage 0, microbatch 0",
        "retrograde: backward of inputs, stage 0, microbatch 0",
        "retrograde: backward of weights, stage 0, microbatch 0",
        "retrograde: reduce gradients, stage 0",
    ]
    assert expected(schedule, 1) == [
        "retrograde: gather weights, stage 1",
        "retrograde: backward, stage 1, microbatch 0",
    ]
