"""Parameters of which this rank has no element, in an update of plain tensors.

[Note: one stands for the others]
A unit is cut as one, and not parameter by parameter, so a rank has no element of most parameters of a unit. An
elementwise update has nothing to compute for them, and all that it keeps for them beside empty tensors is a number or
two, such as how often it has updated them. Still torch takes as long for each of them as for one with elements. So of
parameters with the same numbers one stands for the others. The update sees that one alone, and the others are given its
numbers afterwards: theirs lie side by side in one tensor, so that this is one operation.

Rule 1: one stands for others only as long as the numbers are the same and all of them have a gradient. Each update
        checks this anew, whatever changed since the last.
"""

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.sharded_tensor import ShardedTensor
from retrograde.torch_internals import raw_grad, without_torch_function

_Numbers = tuple[tuple[str, torch.dtype, float], ...]  # what is kept for one parameter: name, dtype, value


class Representative:
    """A parameter without elements here that an update sees in place of others like it."""

    def __init__(self, optimizer: Optimizer, leaf: ShardedParameter, others: list[ShardedParameter]) -> None:
        self.others = others
        self._leaf = leaf
        self._state: dict[str, Any] = optimizer.state[leaf]
        self._numbers: dict[str, torch.Tensor] = {}  # the numbers of the others, by name
        for name, value in _plain_values(self._state):
            numbers = self._numbers[name] = value.expand(len(others)).clone()
            for other, number in zip(others, numbers.unbind(), strict=True):
                optimizer.state[other][name] = number

    @property
    def serves(self) -> bool:
        """Would the others be updated as this one is? (Rule 1)"""
        with without_torch_function():
            if types.NoneType in map(type, map(raw_grad, (self._leaf, *self.others))):
                return False
        return all(bool((numbers == self._state[name]).all()) for name, numbers in self._numbers.items())

    def tell_others(self) -> None:
        """After an update that saw only this parameter, give its numbers to the others."""
        for name, numbers in self._numbers.items():
            numbers.copy_(self._state[name])


def representatives_of(optimizer: Optimizer) -> list[Representative]:
    """Of each group's parameters with the same numbers, choose one. Parameters that were never updated have none."""
    found = []
    for group in optimizer.param_groups:
        alike: dict[_Numbers, list[ShardedParameter]] = {}
        for leaf in _without_elements(group["params"]):
            numbers = _numbers_of(optimizer.state.get(leaf, {}))
            if numbers is not None:
                alike.setdefault(numbers, []).append(leaf)
        found += [Representative(optimizer, first, others) for first, *others in alike.values() if others]
    return found


def _without_elements(params: Iterable[torch.Tensor]) -> Iterator[ShardedParameter]:
    for param in params:
        if type(param) is ShardedParameter and not param.orphaned and not param.piece.numel():
            yield param


def _numbers_of(state: dict[str, Any]) -> _Numbers | None:
    """The numbers in a state; None if it is empty, or has other things than sharded tensors and numbers on the host."""
    values = _plain_values(state)
    if not state or not all(_is_number(value) for _, value in values):
        return None
    return tuple((name, value.dtype, value.item()) for name, value in values)


def _plain_values(state: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in state.items() if not isinstance(value, ShardedTensor)]


def _is_number(value: Any) -> bool:
    """Is it a number in the host's memory? To read one on an accelerator, the host would have to wait for it."""
    return type(value) is torch.Tensor and value.dim() == 0 and value.device.type == "cpu"
