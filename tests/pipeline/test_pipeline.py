"""Pipelines on real ranks against plain torch: every schedule, every kind of model, exact gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from retrograde.pipeline.pipeline import Pipeline
from tests.harness import RankPool
from tests.pipeline.cases import CASES, SCHEDULES, backward_order, compare, plain_step

Ranks = Callable[[int], RankPool]


SPLIT = ("zb-h1", "zb-v", "dualpipe-v", "v-half")
COMPILED = [name for name, case in CASES.items() if case.compiled]


def steps(rank: int, world: int, schedule: str, names: list[str], microbatches: int) -> list[str]:
    """Three steps, the second without zero_grad before it, for each case."""
    wrong = []
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        blocks = case.blocks()
        pipe = Pipeline(case.copies(blocks), schedule=schedule, microbatches=microbatches, loss=case.loss)
        for number in range(3):
            data = case.data()
            if number == 2:
                for p in [*nn.ModuleList(blocks).parameters(), *pipe.parameters()]:
                    p.grad = None
            wanted = plain_step(blocks, data, case.loss, backward_order(pipe.schedule), case.around)
            args = copy.deepcopy(data.args) if 0 in pipe.stages else ()
            with case.around():
                loss = pipe.step(*args, target=data.target, **data.options)
            if not case.same(loss, wanted) or loss.requires_grad:
                wrong.append(f"{name}: step {number}: loss {loss}, torch {wanted}")
            wrong += [f"step {number}: {text}" for text in compare(name, pipe, blocks, case)]
            if any(stage.flights for stage in pipe.stages.values()):
                wrong.append(f"{name}: step {number} left something in flight")
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks(ranks: Ranks, schedule: str) -> None:
    """Compiling takes seconds, so each compiled case runs with one of the schedules that split the backward."""
    compiled = COMPILED[SPLIT.index(schedule) :: len(SPLIT)] if schedule in SPLIT else []
    names = [*(name for name, case in CASES.items() if not case.compiled), *compiled]
    found = ranks(2).run(steps, schedule, names, 4, timeout=100)
    assert [text for by_rank in found for text in by_rank] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(ranks: Ranks, schedule: str) -> None:
    names = ["transformer", "trees", "uneven microbatches", "first blocks frozen", "tied at both ends"]
    found = ranks(4).run(steps, schedule, names, 4, timeout=100)
    assert [text for by_rank in found for text in by_rank] == []
