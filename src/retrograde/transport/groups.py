"""Which ranks are meant: from what users give to a process group of torch.distributed, who is where in it, and which
device it is for."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from retrograde.arguments import Refusal
from retrograde.devices import HOST
from retrograde.layout import Grid

GroupOfRanks = DeviceMesh | dist.ProcessGroup | None


def process_group_of(ranks: GroupOfRanks, name: str, example: str, error: Refusal) -> dist.ProcessGroup:
    """The group itself, the group of a mesh of one dimension, or by default the group of all ranks.

    `name` is that of the argument, and `example` how one dimension of a mesh is given.
    """
    if not dist.is_initialized():
        raise error(
            "no process group: call torch.distributed.init_process_group() first (torchrun sets the environment; "
            "one process works too, as a world of 1)"
        )
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise error(f"{name} has dimensions {_called(ranks)}; give one of them, as {example}")
        return ranks.get_group()
    if ranks is not None:
        return ranks
    assert dist.group.WORLD is not None  # there is one while torch.distributed is initialized
    return dist.group.WORLD


def device_for(group: dist.ProcessGroup, mesh: DeviceMesh | None) -> torch.device:
    """The device for a model that is on none yet: the CPU, or the accelerator's current device. A mesh says which.

    Without a mesh, a process group is for the accelerator if it has a backend for it that is not the CPU's as well:
    gloo may serve both, and counts as the CPU's."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return HOST
    wanted = _has_backend_of_its_own(group, accelerator.type) if mesh is None else mesh.device_type == accelerator.type
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if wanted else HOST


def _has_backend_of_its_own(group: dist.ProcessGroup, kind: str) -> bool:
    """Has the group a backend for this kind of device that is not the CPU's as well?"""
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return kind in backends and backends[kind] != backends.get("cpu")


# ---- meshes of two dimensions: (replicate, shard)
REPLICATE, SHARD = "replicate", "shard"


def group_of_replicas(mesh: DeviceMesh, name: str, error: Refusal) -> dist.ProcessGroup:
    """The group of all ranks of a mesh (replicate, shard), by the backend that it has for shards. All of them
    call this, if that is not the default group."""
    _check_dimensions(mesh, name, error)
    if mesh.get_coordinate() is None:
        raise error(f"{name} has ranks {mesh.mesh.tolist()} and not rank {dist.get_rank()}; give a mesh with this rank")
    members = mesh.mesh.flatten().tolist()
    assert dist.group.WORLD is not None  # there is one while there are meshes
    backend = dist.get_backend_config(mesh.get_group(1))
    by_default = backend == dist.get_backend_config(dist.group.WORLD)
    if by_default and len(members) == dist.get_world_size():
        return dist.group.WORLD
    own = None if by_default else backend
    made = dist.new_group(members, backend=own, use_local_synchronization=True, sort_ranks=False)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _check_dimensions(mesh: DeviceMesh, name: str, error: Refusal) -> None:
    """Refuse a mesh that is not (replicate, shard). Names may say more than that (`dp_replicate`). A mesh of two
    dimensions without names is taken as it is."""
    if mesh.ndim != 2:
        raise error(
            f"{name} has dimensions {_called(mesh)}; give one of them, as mesh['dp'], or two of them, (replicate, "
            f"shard), as mesh['dp_replicate', 'dp_shard']"
        )
    names = mesh.mesh_dim_names
    if names is not None and not (REPLICATE in names[0] and SHARD in names[1]):
        raise error(
            f"{name} has dimensions {names}, not (replicate, shard); give one of them, as mesh[{names[0]!r}], "
            f'or for replicas of a sharded model a mesh with mesh_dim_names=("replicate", "shard"), in this order'
        )


def grid_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> Grid:
    """Who is where on a mesh (replicate, shard), with ranks numbered as they are in the group."""
    place = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
    rows = [[place[rank] for rank in row] for row in mesh.mesh.tolist()]
    return Grid.of(place[dist.get_rank()], rows)


def _called(mesh: DeviceMesh) -> str:
    return str(tuple(mesh.mesh.shape) if mesh.mesh_dim_names is None else mesh.mesh_dim_names)
