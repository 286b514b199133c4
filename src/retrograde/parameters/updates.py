"""Every optimizer's update, whoever made it and when, and what surrounds it: zeroing and clipping.

[Note: plain for a while]
Leaves, gradients and optimizer state are of classes of ours, so that torch asks what a function of them means. An
update that works element by element need not ask a thousand times. For its time they are what their memory is, plain
tensors: their class is changed, and changed back. The objects stay the same, so that groups and states need no
exchange. So it is in torch's own `zero_grad()`. While a closure runs inside an update, everything is sharded again.

Updates of other optimizers (Muon, Adafactor, LAMB, one that nobody knows) run on sharded tensors, function by function
(routes.py): slower, and right.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from retrograde.coordination import Coordinator
from retrograde.parameters.elementwise import is_declared, is_elementwise
from retrograde.parameters.handlers import USED_TOGETHER
from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.owner import Owner
from retrograde.parameters.sharded_tensor import ShardedGradient, ShardedTensor
from retrograde.parameters.state import OptimizerState, adopt_new, sharded_states
from retrograde.torch_internals import (
    around_updates,
    around_zero_grad,
    before_clipping,
    check_before_first_use,
    raw_grad,
    without_torch_function,
)


@functools.cache
def watch_updates() -> None:
    """Put ours around torch's functions, once for the process."""
    check_before_first_use()
    before_clipping(_bring_gradients)
    around_zero_grad(_zeroing)
    around_updates(_updating)


# ---- who is concerned
def _leaves_in(params: Iterable[torch.Tensor]) -> tuple[list[ShardedParameter], list[Owner]]:
    """The sharded parameters whose models are still there, and their owners, each once, in the order given."""
    leaves = [param for param in params if type(param) is ShardedParameter]
    references = dict.fromkeys(leaf._owner for leaf in leaves)
    owners = [owner for reference in references if (owner := reference()) is not None]
    if len(owners) < len(references):
        leaves = [leaf for leaf in leaves if not leaf.orphaned]
    return leaves, owners


def _coordinators(owners: list[Owner]) -> list[Coordinator]:
    return list(dict.fromkeys(owner.coordinator for owner in owners))


def _params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _bring_gradients(params: Iterable[torch.Tensor]) -> None:
    """Where this rank has no gradient of what it is about to use, it waits for those of the others.

    Without it, torch's functions would do nothing on a rank without any backward, and the others would wait for it."""
    leaves, owners = _leaves_in(params)
    for coordinator in _coordinators(owners):
        with without_torch_function():
            idle = all(raw_grad(leaf) is None for leaf in leaves if leaf.coordinator is coordinator)
        if idle:
            coordinator.wait_for_gradients(f"gradients of {leaves[0].slot.name} and others are used")


# ---- zeroing
@contextlib.contextmanager
def _zeroing(params: list[torch.Tensor]) -> Iterator[None]:
    """Around torch's own `zero_grad()`."""
    leaves, owners = _leaves_in(params)
    if not leaves:
        yield
        return
    _bring_gradients(leaves)
    for coordinator in _coordinators(owners):
        coordinator.flush_pending_gradients("zero_grad()")
        coordinator.catch_up_on_gradients(USED_TOGETHER)
    waiting = {owner for owner in owners if owner.flow.has_pending(owner.unit)}
    for leaf in leaves if waiting else ():
        leaf.owner.flow.forget(leaf.unit, leaf.place)
    with _plain(leaves):
        yield


@contextlib.contextmanager
def _plain(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """For a while leaves and their gradients are plain tensors."""
    grads: list[torch.Tensor] = []
    try:
        for leaf in leaves:
            leaf.__class__ = nn.Parameter
        grads += [grad for leaf in leaves if isinstance(grad := leaf.grad, ShardedTensor)]
        for grad in grads:
            grad.__class__ = torch.Tensor
        yield
    finally:
        for grad in grads:
            grad.__class__ = ShardedGradient
        for leaf in leaves:
            leaf.__class__ = ShardedParameter


# ---- updates
def _updating(step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Around what an optimizer's `step()` does between the hooks."""
    leaves, owners = _leaves_in(_params_of(optimizer))
    if not leaves:
        return step(optimizer, *args, **kwargs)
    update = _Update(optimizer, leaves, owners, is_elementwise(optimizer, step))
    if update.on_plain_tensors:
        args = tuple(update.outside(arg) if callable(arg) else arg for arg in args)
        kwargs = {name: update.outside(arg) if callable(arg) else arg for name, arg in kwargs.items()}
    with update:
        return step(optimizer, *args, **kwargs)


class _Update:
    """One run of an update: ranks meet, write their shards, and read again."""

    def __init__(
        self, optimizer: Optimizer, leaves: list[ShardedParameter], owners: list[Owner], on_plain_tensors: bool
    ) -> None:
        self.on_plain_tensors = on_plain_tensors
        self._optimizer = optimizer
        self._leaves = leaves
        self._coordinators = _coordinators(owners)
        self._plain = contextlib.ExitStack()
        self._states: list[torch.Tensor] = []
        self._kept: list[tuple[ShardedParameter, dict[str, Any], int]] = []  # with how many entries there were

    def __enter__(self) -> None:
        for leaf in self._leaves:
            if leaf.copies is not None:
                leaf.copies.check()  # before ranks meet: a step that is refused is refused as a whole
        for coordinator in self._coordinators:
            coordinator.begin_step()
        if self.on_plain_tensors:
            self._become_plain()

    def __exit__(self, *error: object) -> None:
        self._become_sharded()
        with without_torch_function():
            written = [leaf for leaf in self._leaves if raw_grad(leaf) is not None]
            torch.autograd.graph.increment_version(written)  # an optimizer may write memory torch does not see
        for coordinator in self._coordinators:
            coordinator.end_step()

    def outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """`closure` with everything sharded while it runs, between two updates."""

        @functools.wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.__exit__()
            result = closure(*args, **kwargs)
            self.__enter__()
            return result

        return run

    def _become_plain(self) -> None:
        state = self._optimizer.state
        for leaf in self._leaves:
            kept = state.get(leaf, _NOTHING)  # not [leaf], which would make an entry
            self._kept.append((leaf, kept, len(kept)))
            if kept:
                self._states += sharded_states(kept, leaf)
        for value in self._states:
            value.__class__ = torch.Tensor
        self._plain.enter_context(_plain(self._leaves))

    def _become_sharded(self) -> None:
        self._plain.close()
        for value in self._states:
            value.__class__ = OptimizerState
        self._states.clear()
        state = self._optimizer.state
        may_replace = is_declared(self._optimizer)  # an entry by another; torch's own only add entries
        for leaf, kept, entries in self._kept:
            if may_replace or len(kept) != entries or kept is _NOTHING:
                adopt_new(state.get(leaf, _NOTHING), leaf)
        self._kept.clear()


_NOTHING: dict[str, Any] = {}
