"""A model that is sharded over 2 replicas of 2 shards beside a plain one, and what ranks may do differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.meshes import mesh_of
from tests.multiproc.twin import Twin
from tests.small import batch, loss_of

WORLD, REPLICAS = 4, 2
TIMEOUT = 20.0


class MeshTwin(Twin):
    replicas = REPLICAS

    def __init__(self, rank: int, world: int, stage: int, **options: Any) -> None:
        super().__init__(rank, world, stage, mesh=mesh_of(self.replicas, world), timeout=TIMEOUT, **options)

    def compare_replicas(self) -> None:
        """Bit for bit, what each rank holds of the model."""
        mine = torch.cat([unit.shard for unit in self.engine.units])
        everybody = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everybody, mine)
        assert torch.equal(mine, everybody[(self.rank + 2) % 4])

    def differ(self, name: str, steps: int) -> None:
        """Steps in which ranks do different things (`DIFFERENT`), each compared with plain torch."""
        self.optimize()
        for _ in range(steps):
            DIFFERENT[name](self.model, self.rank)
            self.plain_play(DIFFERENT[name])
            self.step()
            self.check()
            self.zero_grad()
        self.compare_replicas()
        self.close()


def _more_backwards(model: nn.Module, rank: int) -> None:
    """Rank 3 does two more than rank 0, and rank 1 none."""
    for step in range((1, 0, 2, 3)[rank]):
        loss_of(model, batch(rank, step)).backward()


def _only_some_blocks(model: Any, rank: int) -> None:
    """Each replica leaves out another block, and rank 3 all but one."""
    x = model.embed(batch(rank))
    for index, block in enumerate(model.blocks):
        if index != rank // 2 and (rank != 3 or index == 2):
            x = block(x)
    x.sum().backward()


def _given_inputs(model: nn.Module, rank: int) -> None:
    """Ranks of the second replica ask for the gradients of two parameters only."""
    params = [model.get_parameter(name) for name in ("blocks.0.up.weight", "head.bias")]
    loss_of(model, batch(rank)).backward(inputs=params if rank > 1 else None)


DIFFERENT: dict[str, Callable[[Any, int], None]] = {
    "more backwards": _more_backwards,
    "only some blocks": _only_some_blocks,
    "given inputs": _given_inputs,
}
