"""Every optimizer's step, whoever made it and when: torch's global step hooks find the engines concerned."""

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from retrograde.errors import UnsupportedError
from retrograde.optim.pieces import ShardedParameter, raw_grad
from retrograde.optim.state import adopt_state
from retrograde.reduction import Reducer


@functools.cache
def watch_steps() -> None:
    """Install the hooks, once for the process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _by_engine(optimizer: torch.optim.Optimizer) -> dict[Reducer, list[ShardedParameter]]:
    engines: dict[Reducer, list[ShardedParameter]] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param, ShardedParameter) and param._unit() is not None:
            engines.setdefault(param.reducer, []).append(param)
    return engines


# These look at a whole parameter or at all of them at once (dot products, rows and columns), not elementwise.
_WHOLE = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon"))


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for reducer, leaves in _by_engine(optimizer).items():
        if isinstance(optimizer, _WHOLE):
            raise UnsupportedError(
                f"{type(optimizer).__name__} on sharded parameter {leaves[0].slot.name}: it needs whole parameters and "
                f"would silently compute with pieces; use an elementwise optimizer (SGD, Adam, AdamW, ...)"
            )
        reducer.begin_step()
        for leaf in leaves:
            leaf.check_copies()
            adopt_state(optimizer, leaf)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for reducer, leaves in _by_engine(optimizer).items():
        for leaf in leaves:
            if raw_grad(leaf) is not None:
                torch.autograd.graph.increment_version(leaf)  # an optimizer may write memory torch does not see
        reducer.end_step()
