"""Who owns a whole parameter, and which optimizers leave it to its owner ([Note: updates by owners] in owned.py)."""

import weakref

from torch.optim import Optimizer

from retrograde.parameters.elementwise import is_elementwise, is_per_parameter
from retrograde.parameters.leaf import ShardedParameter

_by_owners: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # optimizers whose state is kept by owners


def is_whole(leaf: ShardedParameter) -> bool:
    """Does one rank hold all of the parameter? (It then holds all parameters of the unit.)"""
    return leaf.unit.layout.shard_with(leaf.place) is not None


def is_owned(leaf: ShardedParameter) -> bool:
    """Does this rank hold all of the parameter, as one that is not cut?"""
    return leaf.unit.layout.shard_with(leaf.place) == leaf.unit.rank


def is_kept_by_owners(optimizer: Optimizer) -> bool:
    """Has the optimizer been updated by owners, or loaded a state for such updates?"""
    return optimizer in _by_owners


def keep_by_owners(optimizer: Optimizer) -> None:
    _by_owners.add(optimizer)


def updates_by_owners(optimizer: Optimizer) -> bool:
    """Does the optimizer work parameter by parameter, and are all of its sharded parameters whole?"""
    cls = type(optimizer)
    return not is_elementwise(cls) and is_per_parameter(cls) and all(map(is_whole, _leaves(optimizer)))


def updated_elsewhere(optimizer: Optimizer) -> set[ShardedParameter]:
    """The parameters whose updates and optimizer state are left to other ranks, their owners."""
    if not updates_by_owners(optimizer):
        return set()
    return {leaf for leaf in _leaves(optimizer) if not is_owned(leaf)}


def _leaves(optimizer: Optimizer) -> list[ShardedParameter]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param for param in params if isinstance(param, ShardedParameter) and not param.orphaned]
