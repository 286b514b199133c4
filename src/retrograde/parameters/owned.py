"""Parameters that their owners update alone: [Note: updates by owners].

[Note: updates by owners]
A parameter may lie on one rank as a whole (layout/whole.py). An optimizer that works parameter by parameter (Muon,
Adafactor, what `rg.per_parameter` declares) then needs no route for each function. For the time of its update the
owner's leaf, gradient and state are plain tensors in their true shape, on the memory that they have. On the other ranks
the leaf has no gradient, so that optimizers pass it by. Nothing travels but the meeting before the update.

Rule 1: what an owner keeps for a parameter in the parameter's shape is sharded again after the update: all of it is
        the owner's piece. Other things (factors, counters) are plain.
Rule 2: the other ranks keep nothing for it. State that they have, from before the model was sharded or from a plain
        run's file, is deleted.
Rule 3: on the other ranks `optimizer.state_dict()` marks each such parameter as kept by its owner (state.py). By this
        mark `load_state_dict()` notices another rank's file.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.ownership import is_owned
from retrograde.parameters.sharded_tensor import ShardedTensor, turn
from retrograde.parameters.state import adopt_whole
from retrograde.torch_internals import set_data, without_torch_function


@contextlib.contextmanager
def owned_for_a_while(leaves: Sequence[ShardedParameter], optimizer: Optimizer) -> Iterator[list[ShardedParameter]]:
    """Make each leaf plain on its owner, and gradientless on other ranks. Yields the leaves that had a gradient."""
    lent = [(_Owned if is_owned(leaf) else _Others)(leaf, optimizer) for leaf in leaves]
    begun: list[_Others] = []
    try:
        for each in lent:
            begun.append(each)
            each.begin()
        yield [each.leaf for each in lent if each.grad is not None]
    finally:
        with without_torch_function():
            for each in begun:
                each.end()


class _Others:
    """A leaf that another rank updates: on this rank it has no elements."""

    def __init__(self, leaf: ShardedParameter, optimizer: Optimizer) -> None:
        self.leaf = leaf
        self.optimizer = optimizer
        self.grad: torch.Tensor | None = None

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self.leaf, {})  # not [leaf], which makes an entry
        return found

    def begin(self) -> None:
        self.optimizer.state.pop(self.leaf, None)  # Rule 2
        turn(self.leaf, nn.Parameter)
        self.grad = self.leaf.grad
        self.leaf.grad = None

    def end(self) -> None:
        self.leaf.grad = self.grad
        turn(self.leaf, ShardedParameter)


class _Owned(_Others):
    """A leaf that this rank updates."""

    def __init__(self, leaf: ShardedParameter, optimizer: Optimizer) -> None:
        super().__init__(leaf, optimizer)
        self._slot = leaf.slot
        self._piece = leaf.unit.pieces[leaf.place]
        self._shown: torch.Tensor | None = None  # the gradient in its true shape

    def begin(self) -> None:
        leaf = self.leaf
        for value in self.state.values():
            if isinstance(value, ShardedTensor) and value.shape == leaf.shape:
                turn(value, torch.Tensor)
                set_data(value, self._slot.full(value))
        turn(leaf, nn.Parameter)
        self.grad = leaf.grad
        leaf.grad = None
        set_data(leaf, self._slot.full(self._piece))
        if self.grad is not None:
            with without_torch_function():
                self._shown = self._slot.full(self.grad.detach().as_subclass(torch.Tensor))
            leaf.grad = self._shown

    def end(self) -> None:
        leaf = self.leaf
        changed = leaf.grad
        if leaf.data_ptr() != self._piece.data_ptr():  # `p.data = value`: the shard is elsewhere
            self._piece.copy_(self._slot.flatten(leaf.detach()))
        leaf.grad = None
        set_data(leaf, self._piece)
        if changed is not None and changed is self._shown:
            leaf.grad = self.grad
        elif changed is not None:
            leaf.grad = self._slot.flatten(changed)
        turn(leaf, ShardedParameter)
        adopt_whole(self.state, leaf)
