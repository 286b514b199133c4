"""What scripts do with torch's optimizers beside stepping: schedules, groups that come later, averages, steps in hooks.

Each script runs on a sharded model and on a plain one that plays all ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import retrograde as rg
from tests.checkpoint.runs import State, differences, everything
from tests.harness import Ranks
from tests.reference import play
from tests.small import Small, backwards, batch, build, loss_of
from tests.stages import EACH_STAGE

WORLD = 2
Backward = Callable[[int], None]  # of all ranks, on the batches of a step
Script = Callable[[Small, Backward], State]


def _each_step(backward: Backward, optimizer: Optimizer, steps: range = range(4)) -> None:
    for step in steps:
        backward(step)
        optimizer.step()
        optimizer.zero_grad()


# ---- learning rates
def schedules(model: Small, backward: Backward) -> State:
    optimizer = AdamW(model.parameters(), lr=2**-4)
    first, then = LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 3)
    scheduler = SequentialLR(optimizer, [first, then], milestones=[2])
    for step in range(4):
        _each_step(backward, optimizer, range(step, step + 1))
        scheduler.step()
    return {**everything(model, [optimizer]), "lr": scheduler.get_last_lr()}


def plateau(model: Small, backward: Backward) -> State:
    optimizer = SGD(model.parameters(), lr=2**-3, momentum=0.5)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(3):
        _each_step(backward, optimizer, range(step, step + 1))
        scheduler.step(1.0)
    return {**everything(model, [optimizer]), "lr": scheduler.get_last_lr()}


def rate_as_a_tensor(model: Small, backward: Backward) -> State:
    optimizer = AdamW(model.parameters(), lr=torch.tensor(2**-4), foreach=False)
    _each_step(backward, optimizer, range(2))
    optimizer.param_groups[0]["lr"].mul_(0.5)
    _each_step(backward, optimizer, range(2, 4))
    return everything(model, [optimizer])


# ---- groups
def groups_added_later(model: Small, backward: Backward) -> State:
    optimizer = SGD(model.blocks.parameters(), lr=2**-3, momentum=0.5)
    _each_step(backward, optimizer, range(2))
    model.zero_grad()
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 2**-4, "momentum": 0.25})
    optimizer.add_param_group({"params": [model.embed.get_parameter("weight")], "weight_decay": 0.5})
    _each_step(backward, optimizer, range(2, 4))
    return everything(model, [optimizer])


# ---- averages
def swa(model: Small, backward: Backward) -> State:
    optimizer = SGD(model.parameters(), lr=2**-3)
    averaged, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=2**-4, anneal_epochs=2)
    for step in range(3):
        _each_step(backward, optimizer, range(step, step + 1))
        averaged.update_parameters(model)
        scheduler.step()
    return {"average": dict(averaged.module.state_dict()), **everything(model, [optimizer])}


def ema(model: Small, backward: Backward) -> State:
    optimizer = AdamW(model.parameters(), lr=2**-4)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        _each_step(backward, optimizer, range(step, step + 1))
        averaged.update_parameters(model)
    return {"average": dict(averaged.module.state_dict()), **everything(model, [optimizer])}


def ema_by_hand(model: Small, backward: Backward) -> State:
    optimizer = AdamW(model.parameters(), lr=2**-4)
    average = [param.detach().clone() for param in model.parameters()]
    for step in range(3):
        _each_step(backward, optimizer, range(step, step + 1))
        with torch.no_grad():
            for kept, param in zip(average, model.parameters(), strict=True):
                kept.lerp_(param, 0.25)
    wholes = [kept.full_tensor() if hasattr(kept, "full_tensor") else kept for kept in average]
    return {"average": wholes, **everything(model, [optimizer])}


# ---- kinds of updates
def _kind(make: Callable[[Any], Optimizer]) -> Script:
    def script(model: Small, backward: Backward) -> State:
        optimizer = make(model.parameters())
        _each_step(backward, optimizer, range(3))
        return everything(model, [optimizer])

    return script


SCRIPTS: dict[str, Script] = {
    **{each.__name__: each for each in (schedules, plateau, rate_as_a_tensor, groups_added_later)},
    **{each.__name__: each for each in (swa, ema, ema_by_hand)},
    "fused AdamW": _kind(lambda params: AdamW(params, lr=2**-4, fused=True)),
    "fused SGD": _kind(lambda params: SGD(params, lr=2**-4, momentum=0.5, fused=True)),
    "fused Adagrad": _kind(lambda params: torch.optim.Adagrad(params, lr=2**-4, fused=True)),
    "foreach AdamW": _kind(lambda params: AdamW(params, lr=2**-4, foreach=True, amsgrad=True)),
    "foreach SGD": _kind(lambda params: SGD(params, lr=2**-4, momentum=0.5, nesterov=True, foreach=True)),
    "foreach RMSprop": _kind(lambda params: torch.optim.RMSprop(params, lr=2**-6, centered=True, foreach=True)),
    "foreach NAdam": _kind(lambda params: torch.optim.NAdam(params, lr=2**-6, foreach=True)),
    "loop RAdam": _kind(lambda params: torch.optim.RAdam(params, lr=2**-6, foreach=False)),
}


def _on_ranks(rank: int, world: int, name: str, stage: int) -> State:
    model = build()
    rg.shard(model, stage)
    return SCRIPTS[name](model, lambda step: loss_of(model, batch(rank, step)).backward())


@EACH_STAGE
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(ranks: Ranks, name: str, stage: int) -> None:
    plain = build()
    wanted = SCRIPTS[name](plain, lambda step: play(plain, WORLD, backwards(step), stage))
    for found in ranks(WORLD).run(_on_ranks, name, stage):
        assert differences(wanted, found) == []


# ---- in the backward
def _one_for_each(model: nn.Module) -> dict[nn.Parameter, Optimizer]:
    return {param: SGD([param], lr=2**-3, momentum=0.5) for param in model.parameters()}


def _in_backward(rank: int, world: int, stage: int) -> State:
    """Each parameter has an optimizer, which steps as soon as the gradient has come, and lets go of it."""
    model = build()
    engine = rg.shard(model, stage)
    optimizers = _one_for_each(model)

    def step(param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(model, batch(rank, number)).backward()
        assert all(grad is None for grad in engine.full_grads().values())
    return everything(model, list(optimizers.values()))


@EACH_STAGE
def test_in_the_backward(ranks: Ranks, stage: int) -> None:
    plain = build()
    optimizers = _one_for_each(plain)
    for number in range(3):
        play(plain, WORLD, backwards(number), stage)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    wanted = everything(plain, list(optimizers.values()))
    for found in ranks(WORLD).run(_in_backward, stage):
        assert differences(wanted, found) == []
