"""Leaves and their gradients as plain tensors, for a while: [Note: plain for a while] in updates.py."""

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from retrograde.coordination import Coordinator
from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.owner import Owner
from retrograde.parameters.sharded_tensor import ShardedGradient, ShardedTensor
from retrograde.parameters.state import OptimizerState
from retrograde.torch_internals import raw_grad, without_torch_function

_AS_AUTOGRAD_LEAVES_THEM = {torch.Tensor, types.NoneType}  # classes of gradients that nobody has read


def leaves_in(params: Iterable[torch.Tensor]) -> tuple[list[ShardedParameter], list[Owner]]:
    """The sharded parameters whose models are still alive, and their owners, each once, in the order given."""
    leaves = [param for param in params if type(param) is ShardedParameter]
    references = dict.fromkeys(leaf._owner for leaf in leaves)
    owners = [owner for reference in references if (owner := reference()) is not None]
    if len(owners) < len(references):
        leaves = [leaf for leaf in leaves if not leaf.orphaned]
    return leaves, owners


def coordinators_of(owners: list[Owner]) -> list[Coordinator]:
    return list(dict.fromkeys(owner.coordinator for owner in owners))


def bring_gradients_of(params: Iterable[torch.Tensor]) -> None:
    """If this rank has none of the gradients that it is about to use, wait for those of the other ranks.

    Otherwise torch's functions would do nothing on a rank without any backward, and the others would wait for it."""
    leaves, owners = leaves_in(params)
    for coordinator in coordinators_of(owners):
        with without_torch_function():
            idle = all(raw_grad(leaf) is None for leaf in leaves if leaf.coordinator is coordinator)
        if idle:
            coordinator.wait_for_gradients(f"gradients of {leaves[0].slot.name} and others are used")


@contextlib.contextmanager
def plain_for_a_while(
    leaves: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()
) -> Iterator[Sequence[torch.Tensor]]:
    """Make leaves, their gradients and what an optimizer keeps for them plain tensors for a while. Yields the leaves
    that have a gradient."""
    plain, parameter = torch.Tensor, nn.Parameter  # looked up once: there are many
    grads: list[torch.Tensor] = []
    try:
        for state in states:
            state.__class__ = plain
        for leaf in leaves:
            leaf.__class__ = parameter
        found = [leaf.grad for leaf in leaves]
        kinds = set(map(type, found))
        if not kinds <= _AS_AUTOGRAD_LEAVES_THEM:
            grads += [grad for grad in found if isinstance(grad, ShardedTensor)]
            for grad in grads:
                grad.__class__ = plain
        if types.NoneType in kinds:
            yield [leaf for leaf, grad in zip(leaves, found, strict=True) if grad is not None]
        else:
            yield leaves
    finally:
        for grad in grads:
            grad.__class__ = ShardedGradient
        for leaf in leaves:
            leaf.__class__ = ShardedParameter
        for state in states:
            state.__class__ = OptimizerState
