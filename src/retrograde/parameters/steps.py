"""Every optimizer's step, whoever made it and when: torch's global step hooks find the engines concerned.

Clipping and zeroing too, for the sake of ranks that have no gradient where others may have one. A rank without any
backward sees `p.grad` as None everywhere, so torch's functions would do nothing, and the others would wait for it.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from retrograde.coordination import Coordinator
from retrograde.errors import UnsupportedError
from retrograde.parameters.pieces import ShardedParameter
from retrograde.parameters.state import adopt_state
from retrograde.torch_internals import before_clipping, before_zero_grad, check_before_first_use, raw_grad


@functools.cache
def watch_steps() -> None:
    """Install the hooks, once for the process."""
    check_before_first_use()
    before_clipping(_bring_gradients)
    before_zero_grad(_bring_gradients)
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _by_engine(params: Iterable[torch.Tensor]) -> dict[Coordinator, list[ShardedParameter]]:
    engines: dict[Coordinator, list[ShardedParameter]] = {}
    for param in params:
        if isinstance(param, ShardedParameter) and not param.orphaned:
            engines.setdefault(param.coordinator, []).append(param)
    return engines


def _params_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _bring_gradients(params: Iterable[torch.Tensor]) -> None:
    """Where this rank has no gradient of what it is about to use, it waits for those of the others."""
    for coordinator, leaves in _by_engine(params).items():
        if all(raw_grad(leaf) is None for leaf in leaves):
            coordinator.wait_for_gradients(f"gradients of {leaves[0].slot.name} and others are used")


# These look at a whole parameter or at all of them at once (dot products, rows and columns), not elementwise.
_WHOLE = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon"))


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    engines = _by_engine(_params_of(optimizer))
    for leaf in itertools.chain.from_iterable(engines.values()):
        leaf.check_copies()  # before ranks meet: a step that is refused is refused as a whole
    for coordinator, leaves in engines.items():
        if isinstance(optimizer, _WHOLE):
            raise UnsupportedError(
                f"{type(optimizer).__name__} on sharded parameter {leaves[0].slot.name}: it needs whole parameters and "
                f"would silently compute with pieces; use an elementwise optimizer (SGD, Adam, AdamW, ...)"
            )
        coordinator.begin_step()
        for leaf in leaves:
            adopt_state(optimizer, leaf)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for coordinator, leaves in _by_engine(_params_of(optimizer)).items():
        for leaf in leaves:
            if raw_grad(leaf) is not None:
                torch.autograd.graph.increment_version(leaf)  # an optimizer may write memory torch does not see
        coordinator.end_step()
