"""A sharded model beside a plain one that plays all ranks, to be treated in the same way and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.reference import Program, play, same
from tests.small import backwards, batch, build, loss_of

# Powers of two: their products are exact, so that a fused multiply-add, which the kernels use or not depending
# on where a tensor starts, cannot make a difference.
RATE, MOMENTUM = 2**-4, 2**-1

Optimize = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


class Twin:
    """`model` is sharded, `plain` is not."""

    replicas = 1

    def __init__(
        self, rank: int, world: int, stage: int, make: Callable[[], nn.Module] = build, **options: Any
    ) -> None:
        self.rank, self.world, self.stage = rank, world, stage
        self.plain, self.model = make(), make()
        self.engine = self._shard(options)
        self.optimizers: list[torch.optim.Optimizer] = []

    def _shard(self, options: dict[str, Any]) -> rg.Engine:
        return rg.shard(self.model, self.stage, **options)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.model

    def optimize(self, make: Optimize = sgd) -> None:
        self.optimizers += [make(model.parameters()) for model in self.both]

    def backward(self, *steps: int) -> None:
        """One backward for each of the given steps' batches, on both sides."""
        program = backwards(*steps)
        program(self.model, self.rank)
        self.plain_play(program)

    def plain_backward(self, *steps: int, loss: Callable[[nn.Module, Tensor], Tensor] = loss_of) -> None:
        def program(model: nn.Module, rank: int) -> None:
            for step in steps:
                loss(model, batch(rank, step)).backward()

        self.plain_play(program)

    def backwards_and_a_window(self, step: int) -> None:
        """Two backwards, and a third in a window, on both models."""
        for number in (step, step + 10):
            loss_of(self.model, batch(self.rank, number)).backward()
        with self.engine.coalesce():
            loss_of(self.model, batch(self.rank, step + 20)).backward()
        self.plain_backward(step, step + 10, step + 20)

    def plain_play(self, program: Program) -> None:
        """`program(model, rank)` of every rank, on the plain side."""
        play(self.plain, self.world, program, self.stage, self.replicas)

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


def close_to(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of sums that were added in another order: a few units in the last place."""
    return torch.allclose(one, other, rtol=16 * torch.finfo(one.dtype).eps, atol=0.0)
