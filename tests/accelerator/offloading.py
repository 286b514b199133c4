"""Models that are trained with offload on the test device, and in the same way on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.accelerator import device
from tests.patterns.models import SPECS

CPU = torch.device("cpu")
STEPS = 3


class Trained(NamedTuple):
    """`waits`: how often the host waited in each step, by cause."""

    values: list[Tensor]
    waits: list[dict[str, int]]


def build(where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = SPECS["gpt"].build()
    return model if where.type == "cpu" else device.move(model, where)


def sent(x: Tensor, where: torch.device) -> Tensor:
    """Without waiting: from pinned memory."""
    return x if where.type == "cpu" else x.pin_memory().to(where, non_blocking=True)


def train(model: nn.Module, engine: rg.Engine, where: torch.device, rank: int, backwards: int, how: str) -> Trained:
    """AdamW with clipping; `how`: "plain", "coalesce" or "no_sync"."""
    spec = SPECS["gpt"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    waits: list[dict[str, int]] = []
    for step in range(STEPS):
        batches = [[sent(t, where) for t in spec.batch(rank, 100 * step + index)] for index in range(backwards)]
        if where.type != "cpu":
            device.reset_counters()
        with {"plain": torch.enable_grad, "coalesce": engine.coalesce, "no_sync": engine.no_sync}[how]():
            for x, y in batches:
                loss = spec.loss(model(x), y) / backwards
                loss.backward()
                losses.append(loss.detach())
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        optimizer.step()
        optimizer.zero_grad()
        waits.append(device.synchronisations() if where.type != "cpu" else {})
    values = [*losses, *(p.full_tensor().detach() for p in model.parameters())]
    return Trained([value.cpu() for value in values], waits)


def train_late(
    rank: int, world: int, stage: int, mode: str, seed: int, backwards: int = 1, how: str = "plain", **options: Any
) -> Trained:
    """A task for the pool."""
    where = device.of_rank(rank)
    with device.use(mode, seed):
        model = build(where)
        engine = rg.shard(model, stage=stage, timeout=20.0, exact=True, **options)
        trained = train(model, engine, where, rank, backwards, how)
        dist.barrier()
    return trained


def train_on_cpu(rank: int, world: int, stage: int, backwards: int = 1, how: str = "plain", **options: Any) -> Trained:
    """A task for the pool."""
    model = build(CPU)
    trained = train(model, rg.shard(model, stage=stage, timeout=20.0, **options), CPU, rank, backwards, how)
    dist.barrier()
    return trained
