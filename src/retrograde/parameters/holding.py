"""What an optimizer holds that is sharded, remembered from one update to the next.

Between two updates the user may add a group, exchange a parameter, load or change a state or shard the model, and
nothing reports it. So an update compares what the optimizer has with what it had, object by object, and looks through
it again only when some object is another. Comparing takes a tenth of the time of looking.
"""

import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from retrograde.coordination import Coordinator
from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.ownership import is_whole
from retrograde.parameters.plain import coordinators_of, leaves_in
from retrograde.parameters.representatives import Representative, representatives_of
from retrograde.parameters.state import OptimizerState, adopt_new, numbers_in, sharded_states

T = TypeVar("T")
_END = object()  # ends a row of objects; no optimizer has it


class Selection(NamedTuple):
    """What an update of plain tensors goes through."""

    groups: list[list[torch.Tensor]]  # the parameters of each of the optimizer's groups
    leaves: list[ShardedParameter]
    states: list[OptimizerState]  # what the optimizer keeps for the leaves
    hidden: list[ShardedParameter]  # parameters for which a representative stands
    representatives: list[Representative]

    @contextmanager
    def in_place_of_all(self, optimizer: Optimizer) -> Iterator[None]:
        """Put these into the groups for a while, then give hidden parameters the numbers of their representatives."""
        lists = [group["params"] for group in optimizer.param_groups]
        _give(optimizer, self.groups)
        try:
            yield
        finally:
            _give(optimizer, lists)
            for representative in self.representatives:
                representative.tell_others()


def _give(optimizer: Optimizer, lists: list[list[torch.Tensor]]) -> None:
    for group, params in zip(optimizer.param_groups, lists, strict=False):  # an update may have added a group
        group["params"] = params


class Holding:
    """The sharded parameters of one optimizer, and what it keeps for them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._types = [list(map(type, params)) for params in self._groups]
        self.leaves, owners = leaves_in(itertools.chain.from_iterable(self._groups))
        self._owners = [weakref.ref(owner) for owner in owners]
        self.whole = all(map(is_whole, self.leaves))
        self._kept: list[Any] = []  # every value of every state
        self._all = Selection(self._groups, self.leaves, [], [], [])
        self._few = self._all  # without the parameters for which a representative stands

    @property
    def coordinators(self) -> list[Coordinator]:
        return coordinators_of([owner for reference in self._owners if (owner := reference()) is not None])

    def holds(self, optimizer: Optimizer) -> bool:
        """Has the optimizer still the same parameters, of the same classes, and are their models still alive?"""
        groups = [group["params"] for group in optimizer.param_groups]
        same = len(groups) == len(self._groups) and all(map(_same, groups, self._groups))
        return (
            same
            and [list(map(type, params)) for params in groups] == self._types
            and None not in [owner() for owner in self._owners]
        )

    def selection(self, optimizer: Optimizer) -> Selection:
        """What an elementwise update has to go through now; the states in it are sharded."""
        self._notice_changes(optimizer)
        return self._few if all(representative.serves for representative in self._few.representatives) else self._all

    def everything(self, optimizer: Optimizer) -> Selection:
        """All that the optimizer holds, without representatives; the states in it are sharded."""
        self._notice_changes(optimizer)
        return self._all

    def _notice_changes(self, optimizer: Optimizer) -> None:
        if not self._keeps_the_same(optimizer):
            self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        kept = {leaf: optimizer.state.get(leaf, {}) for leaf in self.leaves}  # not [leaf], which makes an entry
        numbers = numbers_in(kept.items())
        states = {leaf: list(sharded_states(state, leaf, numbers)) for leaf, state in kept.items()}
        self._all = Selection(self._groups, self.leaves, _all_of(states.values()), [], [])
        representatives = representatives_of(optimizer)
        hidden = _all_of(representative.others for representative in representatives)
        unseen = set(hidden)
        groups = [[param for param in params if param not in unseen] for params in self._groups]
        leaves = [leaf for leaf in self.leaves if leaf not in unseen]
        self._few = Selection(groups, leaves, _all_of(states[leaf] for leaf in leaves), hidden, representatives)
        self._kept = list(_values_of(optimizer))

    def adopt_new_states(self, optimizer: Optimizer) -> None:
        """Make the states sharded that an update of plain tensors has added."""
        if not self._keeps_the_same(optimizer):
            for leaf in self.leaves:
                adopt_new(optimizer.state.get(leaf, {}), leaf)

    def _keeps_the_same(self, optimizer: Optimizer) -> bool:
        return _same(_values_of(optimizer), self._kept)


def _all_of(lists: Iterable[list[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(lists))


def _values_of(optimizer: Optimizer) -> Iterable[Any]:
    """Every value of every state of the optimizer, passing by entries that are not states of parameters."""
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
