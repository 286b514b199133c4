"""A model behind DeepSpeed's interface beside a plain one that plays all ranks, in torch's own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde.deepspeed as deepspeed
from tests.multiproc.twin import MOMENTUM, RATE, Optimize, sgd
from tests.reference import Program, play, same
from tests.small import Small, loss_of

Config = dict[str, Any]

# Powers of two (tests/multiproc/twin.py).
SGD = {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}}


class WithLoss(Small):
    """Its forward returns the loss, as in DeepSpeed's documentation."""

    def forward(self, ids: Tensor) -> Tensor:
        return loss_of(super().forward, ids)


def build_with_loss(seed: int = 3) -> WithLoss:
    torch.manual_seed(seed)
    return WithLoss()


def config(stage: int, accumulation: int = 1, **more: Any) -> Config:
    zero = {"stage": stage, **more.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "optimizer": SGD,
        **more,
    }


class Pair:
    """`engine` is what `initialize()` returns; `plain` is trained in the same way, with `divisor` for its losses."""

    def __init__(
        self,
        rank: int,
        world: int,
        asked: Config,
        make: Callable[[], nn.Module] = build_with_loss,
        optimize: Optimize = sgd,
    ) -> None:
        self.rank, self.world = rank, world
        self.stage = max(asked["zero_optimization"]["stage"], 1)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(model=make(), config=asked)
        self.plain = make()
        self.divisor = self.engine.gradient_accumulation_steps()
        self.plain_optimizer = optimize([p for p in self.plain.parameters() if p.requires_grad])

    def plain_play(self, program: Program, one_window: bool = False) -> None:
        """What all ranks do, on the plain model. In a window gradients are added up as at stage 1."""
        play(self.plain, self.world, program, 1 if one_window else self.stage)

    def plain_step(self, clip: float = 0.0) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.plain.parameters() if p.grad is not None])
        if clip:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), clip)
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        return norm

    # ---- comparing
    def wrong_weights(self) -> list[str]:
        state = self.engine.module.state_dict()
        return [name for name, value in self.plain.state_dict().items() if not torch.equal(state[name], value)]

    def furthest(self) -> float:
        """The largest difference of a weight, relative to the largest weight of its parameter."""
        state = self.engine.module.state_dict()
        pairs = [(state[name], value) for name, value in self.plain.state_dict().items()]
        return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)

    def wrong_grads(self) -> list[str]:
        grads = self.engine.sharded.full_grads()
        return [name for name, p in self.plain.named_parameters() if not same(grads[name], p.grad)]

    def close(self) -> None:
        dist.barrier()
