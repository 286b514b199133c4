"""A small model for tests of bytes, counts and order, whose sizes are easy to reason about."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from tests.reference import Program

DIM, VOCAB, BLOCKS = 12, 17, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """The root unit is used at both ends of the forward, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 3) -> Small:
    torch.manual_seed(seed)
    return Small()


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def backwards(*steps: int) -> Program:
    """A rank's program: one backward for each of the given steps' batches."""

    def program(model: nn.Module, rank: int) -> None:
        for step in steps:
            loss_of(model, batch(rank, step)).backward()

    return program


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def backward_that_raises(model: Small, ids: Tensor, raises: bool = True) -> None:
    """What comes before the blocks raises a ZeroDivisionError, when the blocks' gradients have been sent."""
    hidden = model.embed(ids)
    if raises:
        hidden = Raises.apply(hidden, ZeroDivisionError())
    for block in model.blocks:
        hidden = block(hidden)
    hidden.sum().backward()


class Tiled(torch.autograd.Function):
    """A loss that runs its backward inside its forward: `Tiled.apply(x, head)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: nn.Module) -> Tensor:
        inside = x.detach().requires_grad_()
        with torch.enable_grad():
            loss = head(inside).square().mean()
            loss.backward()
        ctx.save_for_backward(inside.grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad, None


class Raises(torch.autograd.Function):
    """What it is applied to, until backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


def shards_after_a_mistake(model: Small, rank: int, timeout: float) -> None:
    """A model that some rank could not shard at first is sharded, and trains."""
    dist.barrier()
    engine = rg.shard(model, timeout=timeout)
    loss_of(model, batch(rank)).backward()
    assert engine.full_grad("head.bias") is not None
    dist.barrier()
