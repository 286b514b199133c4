"""Idioms: code of training scripts that runs on a sharded model and on a plain one, and what differs then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.reference import joint_loss

Loss = Callable[..., Tensor]
Idiom = Callable[[nn.Module, Loss], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    )


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-3)


def weight(model: nn.Module) -> nn.Parameter:
    return dict(model.named_parameters())["1.0.weight"]


def trained(model: nn.Module, loss: Loss) -> None:
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def both(rank: int, world: int, stage: int, idiom: Idiom, make: Callable[[], nn.Module]) -> str:
    """What differs between the sharded model and plain torch, whose loss is the mean over the ranks."""
    model, plain = make(), make()
    engine = rg.shard(model, stage, timeout=10.0)

    def of_all(step: int = 0) -> Tensor:
        return joint_loss([_loss(plain, each, step) for each in range(world)])

    # The ranks first: what a rank does alone must not keep the others waiting.
    ours = idiom(model, lambda step=0: _loss(model, rank, step))
    wanted = idiom(plain, of_all)
    grads, state = engine.full_grads(), model.state_dict()
    found = [] if _close(ours, wanted) else [f"{ours} instead of {wanted}"]
    for name, param in plain.named_parameters():
        found += [f"gradient of {name}"] if not _close(grads[name], param.grad) else []
        found += [f"value of {name}"] if not _close(state[name], param.detach()) else []
    dist.barrier()
    return "; ".join(found)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).abs().pow(2).mean()


def _close(ours: Any, wanted: Any) -> bool:
    """Up to rounding: a joint loss adds up the ranks in an order of its own."""
    if isinstance(wanted, Tensor) and isinstance(ours, Tensor):
        return ours.shape == wanted.shape and torch.allclose(ours, wanted, rtol=1e-4, atol=1e-6)
    return type(ours) is type(wanted) and ours == wanted
