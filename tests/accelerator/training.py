"""Small models that are trained in the same way on the CPU and on the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from retrograde.parameters.part import Part
from tests import small
from tests.accelerator import device
from tests.patterns.models import SPECS
from tests.small import batch

STEPS = 3


@contextlib.contextmanager
def on_device(rank: int, mode: str, seed: int) -> Iterator[torch.device]:
    """Programs of tests/small.py and tests/transport/strays.py get their batches on the device, each made once."""
    where = device.of_rank(rank)

    @functools.cache
    def moved(of: int, step: int = 0) -> Tensor:
        return batch(of, step).to(where)

    with mock.patch.object(small, "batch", moved), device.use(mode, seed):
        yield where
        dist.barrier()  # a rank that drops its model takes its shards along


def build(name: str, where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return device.move(SPECS[name].build(), where)


def train(name: str, model: nn.Module, where: torch.device, rank: int = 0, **options: Any) -> list[Tensor]:
    """Losses, norms of gradients and final weights, on the CPU. The host waits for the device only at the end."""
    spec = SPECS[name]
    batches = [spec.batch(rank, step) for step in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    values = []
    for x, y in batches:
        loss = spec.loss(model(_sent(x, where)), _sent(y, where))
        loss.backward()
        values += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(value).cpu() for value in (*values, *model.parameters())]


def counted_step(model: nn.Module, rank: int, clip: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """A step of the sharded "gpt" that is like those before it: what made the host wait, and collectives."""
    where, spec = device.of_rank(rank), SPECS["gpt"]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        x, y = spec.batch(rank, step)
        with device.use("lazy"):
            spec.loss(model(_sent(x, where)), _sent(y, where)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            waits, calls = device.synchronisations(), device.collectives()
    dist.barrier()
    return waits, {name: tally.count for name, tally in calls.items()}


def sharded(name: str, where: torch.device, world: int) -> nn.Module:
    """By FSDP2, in units of a block."""
    model: Any = build(name, where)
    mesh = init_device_mesh(where.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _sent(x: Tensor, where: torch.device) -> Tensor:
    """Without waiting: from pinned memory."""
    return x if where.type == "cpu" else x.pin_memory().to(where, non_blocking=True)


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor | Part) else value
