"""Cuts what the caller gives to a step into microbatches, and hands its gradients back to the caller.

[Note: gradients of what is given]
Inputs, targets and keyword arguments may require gradients. A stage never sees the caller's graph: of such a tensor
each microbatch gets a *stand-in*, a leaf of its own.

    caller's tensor ── copy ── part 0 . . stand-in 0 ── stages          . . : the same memory, no graph
                            └─ part 1 . . stand-in 1 ── stages

Rule 1: stand-ins collect their gradients during the step. When all ranks have agreed that it has succeeded, one
        backward goes on from the parts into the caller's graph; a leaf has its `.grad`, a graph is freed. A failed step
        delivers nothing.
Rule 2: a rank delivers what its own stages contributed: of the inputs on the rank of the first stage, of the target on
        that of the last, of a keyword argument wherever a block took it.
Rule 3: inputs are copied, as a whole: a block may change its input in place, which the caller's graph must not notice,
        and parts of a copy of the whole have the memory order that parts of the tensor itself have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import PipelineError
from retrograde.pipeline.options import Microbatches
from retrograde.torch_internals import tree_flatten, tree_leaves, tree_map_only, tree_unflatten


@dataclass(frozen=True)
class StandIn:
    """Stands for a tensor of the caller's, and gets its gradient."""

    part: Tensor  # a microbatch's part of the caller's tensor, in the caller's graph
    leaf: Tensor  # the stand-in that the stages have


@dataclass
class CallerGradients:
    """The stand-ins of one step on this rank."""

    _made: list[StandIn] = field(default_factory=list)

    def stand_in(self, part: Tensor) -> Tensor:
        """The tensor with which stages compute instead of `part`."""
        if not part.requires_grad:
            return part
        made = StandIn(part, part.detach().requires_grad_())
        self._made.append(made)
        return made.leaf

    def deliver(self) -> None:
        """Run the caller's backward with the gradients of the stand-ins (Rule 1)."""
        made, self._made = self._made, []
        reached = [one for one in made if one.leaf.grad is not None]
        if reached:
            torch.autograd.backward([one.part for one in reached], [one.leaf.grad for one in reached])


def microbatches(value: Any, count: int, name: str, gradients: CallerGradients | None = None) -> list[Any]:
    """Cut `value` into microbatches: tensors along their first dimension; anything else goes to every microbatch.

    With `gradients`, parts of tensors that require one are replaced by stand-ins.
    """
    if isinstance(value, Microbatches):
        if len(value) != count:
            raise PipelineError(f"{name}: {len(value)} microbatches are given, the schedule has {count}; give {count}")
        return [tree_map_only(Tensor, lambda part: _enter(part, gradients), own) for own in value]
    leaves, spec = tree_flatten(value)
    by_leaf = [_cut(leaf, count, name, gradients) for leaf in leaves]
    return [tree_unflatten([parts[number] for parts in by_leaf], spec) for number in range(count)]


def copied(value: Any) -> Any:
    """Return `value` with copies of the tensors that require gradients (Rule 3)."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.requires_grad else tensor

    if isinstance(value, Microbatches):
        return Microbatches(tree_map_only(Tensor, copy, own) for own in value)
    return tree_map_only(Tensor, copy, value)


def _cut(leaf: Any, count: int, name: str, gradients: CallerGradients | None) -> list[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * count
    if leaf.dim() == 0 or leaf.shape[0] < count:
        raise PipelineError(
            f"{name}: a tensor of shape {list(leaf.shape)} cannot be cut into {count} microbatches; give at least "
            f"{count} rows, or rg.Microbatches with the data of each"
        )
    return [_enter(part, gradients) for part in torch.tensor_split(leaf, count)]


def _enter(part: Tensor, gradients: CallerGradients | None) -> Tensor:
    return part if gradients is None else gradients.stand_in(part)


def merged(parts: Sequence[Any]) -> Any:
    """Join microbatches into one value: the opposite of `microbatches`."""
    if not parts:
        return None
    flat = [tree_flatten(part) for part in parts]
    spec = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != spec:
            raise PipelineError(f"outputs differ in their form: that of microbatch {number} is another than the first")
    joined = [_join([leaves[place] for leaves, _ in flat]) for place in range(len(flat[0][0]))]
    return tree_unflatten(joined, spec)


def _join(leaves: list[Any]) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first
    return torch.cat(leaves) if first.dim() > 0 else torch.stack(leaves)


def size(tree: Any) -> int:
    """How many samples a microbatch has: the rows of its first tensor, 0 if it has none."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return 0


def shares_of(sizes: Sequence[int]) -> list[float]:
    """What each of these sizes is of all."""
    return [own / sum(sizes) for own in sizes]
