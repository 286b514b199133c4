"""Meshes of torch for tests: replicas of a sharded model."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NAMES = ("replicate", "shard")


def mesh_of(replicas: int, world: int) -> DeviceMesh | None:
    """All ranks, as so many replicas; of one replica none is needed. Made once: each costs process groups."""
    return None if replicas == 1 else _made(dist.group.WORLD, replicas, world)


@functools.lru_cache(maxsize=8)
def _made(group: dist.ProcessGroup, replicas: int, world: int) -> DeviceMesh:
    """Of one process group, which tests may renew."""
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=NAMES)
