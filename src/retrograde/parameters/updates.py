"""Updates of all optimizers, also of those made before `shard()`, and zeroing and clipping of gradients.

[Note: plain for a while]
Leaves, gradients and optimizer state are of classes of ours, so that torch asks what a function of them means. An
elementwise update has no need of this, and would ask a thousand times. So while it runs they are what their memory is,
plain tensors: their class is changed, and changed back. The objects stay the same, so that groups and states need no
exchange. torch's own `zero_grad()` runs in the same way. While a closure runs inside an update, all is sharded again.

An update that works parameter by parameter runs on the owners of parameters that are whole: [Note: updates by owners]
in owned.py. Updates of other optimizers (LBFGS, LAMB, unknown ones, Muon over parameters that are cut) run on
sharded tensors, function by function (routes.py): slower, and right.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from retrograde.coordination import Coordinator
from retrograde.errors import UnsupportedError
from retrograde.parameters.clipping import clip_norm
from retrograde.parameters.elementwise import is_declared, is_elementwise, is_per_parameter
from retrograde.parameters.holding import Holding, holding_of
from retrograde.parameters.owned import owned_for_a_while
from retrograde.parameters.ownership import is_kept_by_owners, is_whole, keep_by_owners
from retrograde.parameters.part import USED_TOGETHER
from retrograde.parameters.plain import bring_gradients_of, coordinators_of, leaves_in, plain_for_a_while
from retrograde.torch_internals import (
    around_clipping,
    around_updates,
    around_zero_grad,
    check_before_first_use,
    raw_grad,
    without_torch_function,
)


@functools.cache
def watch_updates() -> None:
    """Wrap torch's functions for clipping, zeroing and updates, once for the process."""
    check_before_first_use()
    around_clipping(bring_gradients_of, clip_norm)
    around_zero_grad(_zeroing)
    around_updates(_updating, _refuse_hidden)


def _params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


# ---- zeroing
@contextlib.contextmanager
def _zeroing(params: list[torch.Tensor]) -> Iterator[None]:
    """Bring gradients and make leaves plain around torch's own `zero_grad()`, and forget pending gradients."""
    leaves, owners = leaves_in(params)
    if not leaves:
        yield
        return
    bring_gradients_of(leaves)
    for coordinator in coordinators_of(owners):
        coordinator.flush_pending_gradients("zero_grad()")
        coordinator.catch_up_on_gradients(USED_TOGETHER)
    waiting = any(owner.has_pending_gradients for owner in owners)
    for leaf in leaves if waiting else ():
        leaf.owner.forget_gradient(leaf.place)
    for owner in owners:
        owner.unit.await_gradients()
    with plain_for_a_while(leaves):
        yield


# ---- updates
def _refuse_hidden(optimizer: Optimizer) -> None:
    leaves, _ = leaves_in(_params_of(optimizer))
    if leaves:
        raise UnsupportedError(
            f"{leaves[0].called}: {type(optimizer).__name__}.step was replaced by a function that hides torch's own, "
            f"so that ranks cannot meet before the update: use functools.wraps in what replaces it"
        )


def _updating(step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Run what an optimizer's `step()` does between its hooks, in the way that suits the optimizer."""
    holding = holding_of(optimizer)
    if not holding.leaves:
        return step(optimizer, *args, **kwargs)
    update = _kind_of(optimizer, step, holding)(optimizer, holding)
    args = tuple(update.outside(arg) if callable(arg) else arg for arg in args)
    kwargs = {name: update.outside(arg) if callable(arg) else arg for name, arg in kwargs.items()}
    with update:
        return step(optimizer, *args, **kwargs)


def _kind_of(optimizer: Optimizer, step: Callable[..., Any], holding: Holding) -> "type[_Update]":
    cls = type(optimizer)
    if is_elementwise(cls, step):
        return _PlainUpdate
    if not is_per_parameter(cls, step):
        return _Update
    if holding.whole:
        keep_by_owners(optimizer)
        return _OwnersUpdate
    if is_kept_by_owners(optimizer):
        cut = next(leaf for leaf in holding.leaves if not is_whole(leaf))
        raise UnsupportedError(
            f"{cut.called} is cut, and came to a {cls.__name__} whose other parameters have been updated by their "
            f"owners, who keep its state: list it in rg.shard(whole=...) too, or give it to another optimizer"
        )
    return _Update


class _Update:
    """One run of an update, as a context: ranks meet when it begins, and read each other's new weights after it."""

    def __init__(self, optimizer: Optimizer, holding: Holding) -> None:
        self._optimizer = optimizer
        self._holding = holding
        self._coordinators = holding.coordinators

    def __enter__(self) -> None:
        for leaf in self._holding.leaves:
            if leaf.copies is not None:
                leaf.copies.check()  # before ranks meet: if it raises, no part of the step is done
        for coordinator in self._coordinators:
            self._begin(coordinator)

    def __exit__(self, *error: object) -> None:
        with without_torch_function():
            _written([leaf for leaf in self._holding.leaves if raw_grad(leaf) is not None])
        self._end()

    def _begin(self, coordinator: Coordinator) -> None:
        coordinator.begin_step()
        coordinator.serve_during_step()

    def _end(self) -> None:
        for coordinator in self._coordinators:
            coordinator.end_step()

    def outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a closure that the update calls; here nothing has to be done around it."""
        return closure


class _PlainUpdate(_Update):
    """An elementwise update, which runs on plain tensors."""

    _while_it_runs: contextlib.ExitStack
    _select = staticmethod(Holding.selection)

    def __enter__(self) -> None:
        super().__enter__()
        with contextlib.ExitStack() as stack:
            _written(self._make_plain(stack))
            self._while_it_runs = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._while_it_runs.close()  # does the same whether or not the update raised
        self._adopt()
        self._end()

    def _make_plain(self, stack: contextlib.ExitStack) -> Sequence[torch.Tensor]:
        """Make leaves plain until `stack` is closed. Returns the leaves that the update writes."""
        selected = self._select(self._holding, self._optimizer)
        stack.enter_context(selected.in_place_of_all(self._optimizer))
        updated = stack.enter_context(plain_for_a_while(selected.leaves, selected.states))
        return [*updated, *selected.hidden]

    def _adopt(self) -> None:
        """Make new states sharded. Declared optimizers may have replaced `p.data`, so leaves return to their shards."""
        if is_declared(type(self._optimizer)):
            for leaf in self._holding.leaves:
                leaf.return_to_shard()
        self._holding.adopt_new_states(self._optimizer)

    def _begin(self, coordinator: Coordinator) -> None:
        coordinator.begin_step()

    def outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a closure so that everything is sharded while it runs: one update ends before it, another begins after.
        There are no representatives then, since the optimizer may take its parameters from the groups before it calls
        the closure, and go through them afterwards."""
        self._select = Holding.everything

        @functools.wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.__exit__()
            result = closure(*args, **kwargs)
            self.__enter__()
            return result

        return run


class _OwnersUpdate(_PlainUpdate):
    """An update in which each owner updates its parameters alone."""

    def _make_plain(self, stack: contextlib.ExitStack) -> Sequence[torch.Tensor]:
        return stack.enter_context(owned_for_a_while(self._holding.leaves, self._optimizer))

    def _adopt(self) -> None:
        """Do nothing: `owned_for_a_while` has made the state sharded again."""


def _written(leaves: Sequence[torch.Tensor]) -> None:
    torch.autograd.graph.increment_version(leaves)  # an optimizer may write memory torch does not see
