"""bf16, fp16 and their keys, against plain torch with fp32 masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde.deepspeed as deepspeed
from retrograde.layout import Precision
from tests.deepspeed.pair import build_with_loss, config
from tests.harness import RankPool
from tests.multiproc.precise import computing
from tests.multiproc.twin import sgd
from tests.reference import Rounding, play
from tests.small import batch
from tests.stages import EACH_STAGE

Ranks = Callable[[int], RankPool]

KEYS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "by another name": {"bfloat16": {"enabled": True}, "communication_data_type": "fp32"},
    "in fp32": {"bf16": {"enabled": True}, "gradient_accumulation_dtype": "fp32"},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
    "fixed": {"fp16": {"enabled": True, "loss_scale": 128}},
}


class Plain:
    """A model that computes, one that is trained, and a scale for its losses."""

    def __init__(self, world: int, stage: int, said: Precision) -> None:
        self.world, self.stage = world, stage
        self.masters = build_with_loss()
        self.low = computing(build_with_loss(), said)
        self.rounding = Rounding(said.waiting, said.wire)
        self.optimizer = sgd(self.masters.parameters())

    def update(self, steps: tuple[int, ...], scale: float) -> None:
        def program(model: nn.Module, rank: int) -> None:
            for step in steps:
                (model(batch(rank, step)).float() * scale).backward()

        halved = [param.register_hook(lambda grad: grad / len(steps)) for param in self.low.parameters()]
        play(self.low, self.world, program, self.stage, 1, self.masters, self.rounding)
        for handle in halved:
            handle.remove()
        with torch.no_grad():
            for param in self.masters.parameters():
                if param.grad is not None:
                    param.grad.mul_(1 / scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, param in self.low.named_parameters():
                param.copy_(self.masters.get_parameter(name))


def _trained(rank: int, world: int, stage: int, keys: str) -> list[float]:
    engine, _, _, _ = deepspeed.initialize(model=build_with_loss(), config=config(stage, 2, **KEYS[keys]))
    said = engine.sharded.policy.precision
    plain = Plain(world, stage, said)
    scales = []
    for step in range(4):
        scales.append(engine.loss_scale)
        for micro in (0, 1):
            engine.backward(engine(batch(rank, 2 * step + micro)))
            engine.step()
        plain.update((2 * step, 2 * step + 1), scales[-1])
        state = engine.module.state_dict()
        wrong = [name for name, value in plain.masters.state_dict().items() if not torch.equal(state[name], value)]
        assert wrong == [] and engine.was_step_applied(), (step, wrong)
    dist.barrier()
    return scales


@EACH_STAGE
@pytest.mark.parametrize(
    ("keys", "scales"),
    (
        ("bf16", [1.0] * 4),
        ("by another name", [1.0] * 4),
        ("in fp32", [1.0] * 4),
        ("fp16", [256.0, 256.0, 512.0, 512.0]),
        ("fixed", [128.0] * 4),
    ),
)
def test_weights_are_those_of_masters(ranks: Ranks, stage: int, keys: str, scales: list[float]) -> None:
    assert ranks(2).run(_trained, stage, keys) == [scales] * 2


# ---- windows
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
WINDOWS: dict[str, dict[str, Any]] = {
    **{keys: KEYS[keys] for keys in ("bf16", "in fp32", "fixed")},
    "in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "in fp32, offloaded": {**KEYS["in fp32"], **OFFLOAD},
    "fp16 in fp32": {**KEYS["fixed"], "data_types": {"grad_accum_dtype": "fp32"}},
}


def _in_windows(rank: int, world: int, stage: int, keys: str) -> tuple[list[str], set[int]]:
    """Two updates, each of four backwards in a window: gradients wait in the dtype that the config says."""
    engine, _, _, _ = deepspeed.initialize(model=build_with_loss(), config=config(stage, 4, **WINDOWS[keys]))
    plain = Plain(world, 1, engine.sharded.policy.precision)  # a window is one group, as stage 1 is
    for step in range(2):
        parts = tuple(range(4 * step, 4 * step + 4))
        scale = engine.loss_scale
        with engine.coalesce_grad_reduction():
            for part in parts:
                engine.backward(engine(batch(rank, part)))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        plain.update(parts, scale)
    state = engine.module.state_dict()
    wrong = [name for name, value in plain.masters.state_dict().items() if not torch.equal(state[name], value)]
    counts = {engine.sharded.ledger.count("reduce", unit.name) for unit in engine.sharded.units}
    dist.barrier()
    return wrong, counts


@EACH_STAGE
@pytest.mark.parametrize("keys", WINDOWS)
def test_windows_are_those_of_masters(ranks: Ranks, stage: int, keys: str) -> None:
    assert ranks(2).run(_in_windows, stage, keys) == [([], {2})] * 2


def _overflown(rank: int, world: int) -> list[Any]:
    asked = config(3, fp16={"enabled": True, "initial_scale_power": 4, "min_loss_scale": 8})
    engine, _, _, _ = deepspeed.initialize(model=build_with_loss(), config=asked)
    before = engine.module.state_dict()
    seen: list[Any] = []
    for _ in range(2):
        loss = engine(batch(rank)) * (2.0**40 if rank == 1 else 1.0)
        engine.backward(loss.float())
        engine.step()
        seen += [engine.was_step_applied(), engine.loss_scale]
    after = engine.module.state_dict()
    same = all(torch.equal(after[name], value) for name, value in before.items())
    dist.barrier()
    return [*seen, engine.skipped_steps, same]


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Ranks) -> None:
    assert ranks(2).run(_overflown) == [[False, 8.0, False, 8.0, 2, True]] * 2


def _not_scaled(rank: int, world: int, stage: int) -> list[str]:
    """A backward by hand that forgets `scale()`; the next one does not, in an accumulation with losses made before."""
    engine, _, _, _ = deepspeed.initialize(model=build_with_loss(), config=config(stage, 2, **KEYS["fixed"]))
    plain = Plain(world, stage, engine.sharded.policy.precision)
    said = []
    for forgotten in (lambda loss: loss.backward(), lambda loss: (loss * 2).backward()):
        with pytest.raises(deepspeed.ConfigError) as refused:
            forgotten(engine(batch(rank)))
        said.append(str(refused.value))
    engine.zero_grad()
    with pytest.raises(deepspeed.ConfigError, match=r"^loss=3\.0 is not a tensor"):
        engine.scale(3.0)
    first = engine.scale(engine(batch(rank, 0)))
    second = engine(batch(rank, 1))
    first.backward()
    engine.step()
    engine.scale(second).backward()
    engine.step()
    plain.update((0, 1), 128.0)
    state = engine.module.state_dict()
    said += [name for name, value in plain.masters.state_dict().items() if not torch.equal(state[name], value)]
    dist.barrier()
    return said


@EACH_STAGE
def test_a_loss_that_is_not_scaled_is_refused(ranks: Ranks, stage: int) -> None:
    for said in ranks(2).run(_not_scaled, stage):
        assert len(said) == 2 and all("call engine.backward(loss), or engine.scale(loss)" in each for each in said)


def test_models_are_made_in_the_dtype_of_init() -> None:
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        made = nn.Linear(2, 2)
    assert made.weight.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32
