"""Every optimizer's step, whoever made it and when: torch's global step hooks find the engines concerned."""

import functools
from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from retrograde.errors import UnsupportedError
from retrograde.optim.pieces import ShardedParameter


class Stepped(Protocol):
    def before_step(self) -> None: ...

    def after_step(self, leaves: list[ShardedParameter]) -> None: ...


@functools.cache
def watch_steps() -> None:
    """Install the hooks, once for the process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _by_engine(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Stepped, list[ShardedParameter]]]:
    engines: dict[Any, list[ShardedParameter]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) is ShardedParameter and (holder := param.holder()) is not None:
                engines.setdefault(holder, []).append(param)
    return cast(Iterable[tuple[Stepped, list[ShardedParameter]]], engines.items())


# These look at a whole parameter or at all of them at once (dot products, rows and columns), not elementwise.
_WHOLE = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon"))


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine, leaves in _by_engine(optimizer):
        if isinstance(optimizer, _WHOLE):
            raise UnsupportedError(
                f"{type(optimizer).__name__} on sharded parameter {leaves[0].slot.name}: it needs whole parameters and "
                f"would silently compute with pieces; use an elementwise optimizer (SGD, Adam, AdamW, ...)"
            )
        engine.before_step()


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine, leaves in _by_engine(optimizer):
        engine.after_step(leaves)
