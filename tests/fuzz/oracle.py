"""A case on plain torch: every rank's acts on a copy of its own, put together under the rules of the stage.

The rules are those of tests/reference.py. What is different here: whole numbers, whose sums do not depend on their
order, where ranks do different things; a third of them is none, so three ranks are added up and not averaged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.models import Model, build
from tests.fuzz.play import RATE, TOGETHER, Player, edit_weights, install_hooks, nothing, sgd
from tests.fuzz.recipes import Act, Phase, Recipe
from tests.fuzz.touches import Toucher
from tests.fuzz.traces import Trace, copies
from tests.multiproc.precise import computing
from tests.reference import Contribution, PlainRanks, Recorder, Rounding


class PlainSide:
    """One rank's copy of the model."""

    def __init__(self, rank: int, model: Model, recorder: Recorder) -> None:
        self.rank, self.model, self.recorder = rank, model, recorder
        self.records: list[tuple[str, Tensor]] = []

    def window(self, phase: Phase) -> AbstractContextManager[Any]:
        if phase.window is None:
            return nothing()
        return self.recorder.window(joins_next=phase.window == "no_sync")

    def assign(self, grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            self.recorder.assign(name, grad)

    def backward(self, act: Act) -> AbstractContextManager[None]:
        return nothing()

    def record(self, name: str, value: Tensor) -> None:
        self.records.append((name, value.detach().clone()))


def play(recipe: Recipe) -> list[Trace]:
    """What each rank should see."""
    models = [build(recipe) for _ in range(recipe.world)]
    hook = step_in_backward if recipe.in_backward else None
    masters = None
    if recipe.precision is not None:
        masters = build(recipe)
        models = [computing(model, recipe.dtypes) for model in models]
    rounding = Rounding(recipe.dtypes.waiting, recipe.dtypes.wire)
    ranks = PlainRanks(models, recipe.stage, hook, divisor(recipe), recipe.replicas, masters, rounding)
    for model, recorder in zip(models, ranks.recorders, strict=True):
        install_hooks(recipe, model)
        recorder.divisor = recipe.parts
    sides = [PlainSide(rank, model, ranks.recorders[rank]) for rank, model in enumerate(models)]
    players = [Player(recipe, side) for side in sides]
    trained = ranks.trained
    optimizer, toucher = sgd(trained, recipe), Toucher(trained)
    grads, backwards = [], []
    for phase in recipe.phases:
        ranks.begin()
        for player in players:
            player.phase(phase)
        backwards.append(_backwards(ranks.recorders[0]))
        ranks.reduce()
        if phase.raises:
            TOGETHER["zero"](recipe, trained, optimizer)
        grads.append(copies({name: p.grad for name, p in trained.named_parameters()}))
        for seen in map(toucher.touch, phase.touches):
            for side in sides:
                side.records += seen
        for name in phase.then:
            if name == "edit weights" and masters is not None:
                _edit_pages(ranks)
            else:
                TOGETHER[name](recipe, trained, optimizer)
        ranks.follow()
    weights = copies(trained.state_dict())
    return [Trace(grads, weights, side.records, backwards=backwards) for side in sides]


@torch.no_grad()
def _edit_pages(ranks: PlainRanks) -> None:
    """An edit of what computes reaches the masters of the elements that it has changed."""
    ranks.follow()
    low = ranks.models[0]
    before = copies(dict(low.named_parameters()))
    edit_weights(low)
    for name, param in low.named_parameters():
        master = ranks.params[name]
        master.copy_(torch.where(param == before[name], master, param.to(master.dtype)))


def _backwards(recorder: Recorder) -> dict[str, set[int]]:
    """Which backwards brought a gradient of each parameter, on one rank. In a window all count as one."""
    return {
        name: {entry.group for entry in timeline if isinstance(entry, Contribution)}
        for name, timeline in recorder.timelines.items()
    }


@torch.no_grad()
def step_in_backward(param: torch.nn.Parameter) -> None:
    param.sub_(param.grad * RATE)
    param.grad = None


def divisor(recipe: Recipe) -> int:
    """A third is no exact number."""
    return 1 if recipe.exact and recipe.world == 3 else recipe.world
