"""Chains of small layers, a unit each, over ranks that are threads, and backwards that raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.shard import Options, shard_over
from retrograde.transport import ThreadRanks

BLOCKS = 4


def chains(world: int) -> list[nn.Sequential]:
    """Made before threads begin: random numbers are the process's."""
    made = []
    for _ in range(world):
        torch.manual_seed(0)
        made.append(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(BLOCKS)]))
    return made


def sharded(ranks: ThreadRanks, model: nn.Module, **options: Any) -> rg.Engine:
    return shard_over(ranks, model, Options(**{"units": [nn.Linear], "timeout": 20.0, **options}))


class Stop(Exception):
    pass


def stop(grad: Tensor) -> None:
    raise Stop
