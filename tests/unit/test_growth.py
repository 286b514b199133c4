"""What a step computes besides torch grows with the number of units, not with its square."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import retrograde
from retrograde.engine.shard import Options, shard_over
from retrograde.transport import FakeRanks
from tests.stages import EACH_STAGE

ROOMS = Path(retrograde.__file__).parent


def calls_of_a_step(stage: int, blocks: int) -> Counter[str]:
    """Of the engine's functions, by room, in the third step: the first two learn the order of units."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks)])
    engine = shard_over(FakeRanks(world=2), model, Options(stage=stage, units=lambda module: module in set(model)))
    assert len(engine.units) == blocks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOMS):
            counts[path.relative_to(ROOMS).parts[0]] += 1

    for step in range(3):
        sys.setprofile(count if step == 2 else None)
        try:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    return counts


@EACH_STAGE
def test_calls_grow_as_units_do(stage: int) -> None:
    few, more, most = (calls_of_a_step(stage, blocks) for blocks in (8, 16, 24))
    for room in most:
        assert most[room] - more[room] == more[room] - few[room], room
