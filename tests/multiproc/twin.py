"""A sharded model beside a plain one that plays all ranks, to be treated in the same way and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.small import Small, batch, build, loss_of

# Powers of two: their products are exact, so that a fused multiply-add, which the kernels use or not depending
# on where a tensor starts, cannot make a difference.
RATE, MOMENTUM = 2**-4, 2**-1

Optimize = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


def mean(grads: Iterable[Tensor | None], world: int) -> Tensor | None:
    """The engine's reduction: in rank order, who has nothing is left out of the sum but not of the divisor."""
    present = [grad for grad in grads if grad is not None]
    return functools.reduce(torch.add, present) / world if present else None


def add_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    if grad is not None:
        param.grad = grad if param.grad is None else param.grad + grad


class Twin:
    """`model` is sharded, `plain` is not."""

    def __init__(
        self, rank: int, world: int, stage: int, make: Callable[[], nn.Module] = build, **options: Any
    ) -> None:
        self.rank, self.world, self.stage = rank, world, stage
        self.plain, self.model = make(), make()
        self.engine = rg.shard(self.model, stage, **options)
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.model

    def optimize(self, make: Optimize = sgd) -> None:
        self.optimizers += [make(model.parameters()) for model in self.both]

    def backward(self, *steps: int) -> None:
        """One backward for each of the given steps' batches, on both sides."""
        for step in steps:
            loss_of(self.model, batch(self.rank, step)).backward()
        self.plain_backward(*steps)

    def plain_backward(self, *steps: int, loss: Callable[[nn.Module, Tensor], Tensor] = loss_of) -> None:
        named = [(name, p) for name, p in self.plain.named_parameters() if p.requires_grad]
        params = [p for _, p in named]
        by_rank = [
            [torch.autograd.grad(loss(self.plain, batch(r, s)), params, allow_unused=True) for s in steps]
            for r in range(self.world)
        ]
        for index, param in enumerate(params):
            grads = [[each[index] for each in backwards] for backwards in by_rank]
            if self.stage == 1:  # adds up on each rank, then reduces once
                grads = [[mean(backwards, 1)] for backwards in grads]
            for moment in zip(*grads, strict=True):
                add_grad(param, mean(moment, self.world))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for model in self.both:
            model.zero_grad(set_to_none=set_to_none)

    def train(self, step: int) -> None:
        self.backward(step)
        self.step()
        self.zero_grad()

    # ---- comparing
    def check(self) -> None:
        self.check_grads()
        self.check_weights()

    def check_weights(self) -> None:
        state = self.model.state_dict()
        expected = self.plain.state_dict()
        assert list(state) == list(expected)
        wrong = [name for name in expected if not torch.equal(state[name], expected[name])]
        assert not wrong, f"rank {self.rank}: weights differ from plain torch in {wrong}"

    def check_grads(self) -> None:
        grads = self.engine.full_grads()
        wrong = [n for n, p in self.plain.named_parameters() if not same(grads[n], p.grad)]
        assert not wrong, f"rank {self.rank}: gradients differ from plain torch in {wrong}"

    def close(self) -> None:
        """A rank that drops its model takes its shards along, and others may still be reading them."""
        dist.barrier()


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def close_to(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of sums that were added in another order: a few units in the last place."""
    return torch.allclose(one, other, rtol=16 * torch.finfo(one.dtype).eps, atol=0.0)


__all__ = ["Small", "Twin", "add_grad", "batch", "build", "close_to", "loss_of", "mean", "same", "sgd"]
