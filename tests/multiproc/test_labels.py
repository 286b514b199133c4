"""Profiles name units: page-ins, waits, buckets, reductions and meetings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

import retrograde as rg
from retrograde.labels import PREFIX
from tests.harness import RankPool
from tests.small import BLOCKS, batch, build, loss_of
from tests.stages import EACH_STAGE

UNITS = ["(root)", *(f"blocks.{index}" for index in range(BLOCKS))]


def _profiled(rank: int, world: int, stage: int) -> Counter[str]:
    model = build()
    rg.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss_of(model, batch(rank)).backward()
        optimizer.step()
    names = [event.name for event in recorded.events()]
    return Counter(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))


@EACH_STAGE
def test_a_step_in_a_profile(ranks: Callable[[int], RankPool], stage: int) -> None:
    for seen in ranks(2).run(_profiled, stage):
        for unit in UNITS:
            assert seen[f"page-in of {unit}"] == seen[f"wait for page of {unit}"] >= 1
            assert seen[f"copy into bucket of {unit}"] == 1
            assert seen[f"send gradient of {unit}"] == seen[f"sum of gradient of {unit}"] == 1
        assert seen["meeting: step"] == 1
        assert seen["meeting: backward"] == (0 if stage == 1 else 1)


def _quiet(rank: int, world: int) -> int:
    """How often torch was asked for a label where nobody records."""
    asked = []
    original = torch.profiler.record_function

    def counted(name: str) -> object:
        asked.append(name)
        return original(name)

    torch.profiler.record_function = counted  # type: ignore[assignment, misc]
    try:
        model = build()
        rg.shard(model, 3)
        loss_of(model, batch(rank)).backward()
    finally:
        torch.profiler.record_function = original  # type: ignore[misc]
    return len(asked)


def test_labels_cost_nothing_where_nobody_looks(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_quiet) == [0, 0]
