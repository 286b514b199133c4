"""Which ranks are meant: from what users give to a process group of torch.distributed."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from retrograde.arguments import Refusal

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
            raise error(f"{name} has dimensions {ranks.mesh_dim_names}; give one of them, as {example}")
        return ranks.get_group()
    if ranks is not None:
        return ranks
    assert dist.group.WORLD is not None  # there is one while torch.distributed is initialized
    return dist.group.WORLD
