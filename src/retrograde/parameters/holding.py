"""What an optimizer holds that is sharded, kept from one update to the next.

Between two updates anybody may add a group, exchange a parameter, load or change a state, shard the model: nobody is
told. So an update compares what the optimizer has with what it had, object by object, and looks again only when
something is another object. To compare takes a tenth of the time.
"""

import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from retrograde.coordination import Coordinator
from retrograde.parameters.ownership import is_whole
from retrograde.parameters.plain import coordinators_of, leaves_in
from retrograde.parameters.state import adopt_new, sharded_states

_END = object()  # of a row of objects: none that an optimizer has


class Holding:
    """The sharded parameters of one optimizer, and what it keeps for them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._types = [list(map(type, params)) for params in self._groups]
        self.leaves, owners = leaves_in(itertools.chain.from_iterable(self._groups))
        self._owners = [weakref.ref(owner) for owner in owners]
        self.whole = all(map(is_whole, self.leaves))
        self._kept: list[Any] = []  # every value of every state
        self._sharded: list[torch.Tensor] = []  # those of them that are

    @property
    def coordinators(self) -> list[Coordinator]:
        return coordinators_of([owner for reference in self._owners if (owner := reference()) is not None])

    def holds(self, optimizer: Optimizer) -> bool:
        """Has it still the same parameters, of the same classes, of models that are still there?"""
        groups = [group["params"] for group in optimizer.param_groups]
        same = len(groups) == len(self._groups) and all(map(_same, groups, self._groups))
        return (
            same
            and [list(map(type, params)) for params in groups] == self._types
            and None not in [owner() for owner in self._owners]
        )

    def states(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """What an elementwise one keeps that is sharded."""
        if not self._keeps_the_same(optimizer):
            kept = ((leaf, optimizer.state.get(leaf, {})) for leaf in self.leaves)  # not [leaf], which makes an entry
            self._sharded = [value for leaf, state in kept for value in sharded_states(state, leaf)]
            self._kept = list(_values_of(optimizer))
        return self._sharded

    def adopt_new_states(self, optimizer: Optimizer) -> None:
        """After an update of plain tensors."""
        if not self._keeps_the_same(optimizer):
            for leaf in self.leaves:
                adopt_new(optimizer.state.get(leaf, {}), leaf)

    def _keeps_the_same(self, optimizer: Optimizer) -> bool:
        return _same(_values_of(optimizer), self._kept)


def _values_of(optimizer: Optimizer) -> Iterable[Any]:
    """All that it keeps. There may be other things than the states of parameters."""
    states: Iterable[Any] = optimizer.state.values()
    if not set(map(type, states)) <= {dict}:
        states = [each for each in states if isinstance(each, dict)]
    return itertools.chain.from_iterable(map(dict.values, states))


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Are they the same objects, and as many?"""
    end = (_END,)
    return all(map(operator.is_, itertools.chain(some, end), itertools.chain(others, end)))


_holdings: "weakref.WeakKeyDictionary[Optimizer, Holding]" = weakref.WeakKeyDictionary()


def holding_of(optimizer: Optimizer) -> Holding:
    known = _holdings.get(optimizer)
    if known is None or not known.holds(optimizer):
        known = _holdings[optimizer] = Holding(optimizer)
    return known
