"""A case on plain torch: every rank's acts on a copy of its own, put together under the rules of the stage.

The rules are those of tests/patterns/oracle.py: what reaches a leaf is written down and replayed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.models import build
from tests.fuzz.play import RATE, TOGETHER, Player, install_hooks, nothing, sgd
from tests.fuzz.recipes import Act, Phase, Recipe
from tests.fuzz.traces import Trace, copies
from tests.patterns.oracle import Contribution, Recorder, replay


class PlainSide:
    """One rank's copy of the model."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.rank, self.model = rank, build(recipe)
        self.recorder = Recorder(self.model)
        install_hooks(recipe, self.model)
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
    sides = [PlainSide(recipe, rank) for rank in range(recipe.world)]
    players = [Player(recipe, side) for side in sides]
    trained = sides[0].model
    optimizer = sgd(trained, recipe)
    reduced: dict[str, Tensor | None] = dict.fromkeys(dict(trained.named_parameters()))
    grads, backwards = [], []
    for phase in recipe.phases:
        for side, player in zip(sides, players, strict=True):
            side.model.zero_grad()
            side.recorder.begin()
            player.phase(phase)
        backwards.append(_backwards(sides[0].recorder))
        _put_together(recipe, sides, reduced)
        if phase.raises:
            TOGETHER["zero"](recipe, trained, optimizer)
        grads.append(copies({name: p.grad for name, p in trained.named_parameters()}))
        for name in phase.then:
            TOGETHER[name](recipe, trained, optimizer)
        reduced = {name: p.grad for name, p in trained.named_parameters()}
        _follow(sides)
    weights = copies(trained.state_dict())
    return [Trace(grads, weights, side.records, backwards=backwards) for side in sides]


def _backwards(recorder: Recorder) -> dict[str, set[int]]:
    """Which backwards brought a gradient of each parameter, on one rank. In a window all count as one."""
    return {
        name: {entry.group for entry in timeline if isinstance(entry, Contribution)}
        for name, timeline in recorder.timelines.items()
    }


def _put_together(recipe: Recipe, sides: list[PlainSide], reduced: dict[str, Tensor | None]) -> None:
    for name, param in sides[0].model.named_parameters():
        param.grad = reduced[name]
        timelines = [side.recorder.timelines[name] for side in sides]
        if recipe.in_backward:
            replay(param, timelines, 2, step_in_backward)
        else:
            replay(param, timelines, recipe.stage, divisor=divisor(recipe))


@torch.no_grad()
def step_in_backward(param: torch.nn.Parameter) -> None:
    param.sub_(param.grad * RATE)
    param.grad = None


def divisor(recipe: Recipe) -> int:
    """A third is no exact number."""
    return 1 if recipe.exact and recipe.world == 3 else recipe.world


@torch.no_grad()
def _follow(sides: list[PlainSide]) -> None:
    params = dict(sides[0].model.named_parameters())
    for side in sides[1:]:
        for name, param in side.model.named_parameters():
            param.copy_(params[name])
            param.requires_grad_(params[name].requires_grad)
