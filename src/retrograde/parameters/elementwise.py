"""Which optimizers work element by element, and which parameter by parameter."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from retrograde.arguments import shown
from retrograde.errors import ShardingError
from retrograde.torch_internals import original_of, prepares_as

C = TypeVar("C", bound=type[Optimizer])

# torch's own optimizers that compute each element of a parameter from that element of its gradient and its state.
_TORCHS = tuple(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
# torch's own optimizers that compute a parameter from all of its gradient and state, and nothing of other parameters.
_TORCHS_BY_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)
_declared: set[type[Optimizer]] = set()
_declared_by_parameter: set[type[Optimizer]] = set()
_found: dict[tuple[type[Optimizer], Callable[..., Any] | None], bool] = {}  # answers of is_elementwise


def elementwise(optimizer: C) -> C:
    """Declare that an optimizer's class computes each element of a parameter from that element alone (of its gradient
    and of its state). Its `step()` then runs on plain local tensors, as those of torch's own do.

    Also a decorator of the class. A number that it computes over a whole tensor, a norm for instance, would be this
    rank's own."""
    _check_class("elementwise", optimizer)
    _declared.add(optimizer)
    _found.clear()
    return optimizer


def per_parameter(optimizer: C) -> C:
    """Declare that an optimizer's class computes each parameter from that parameter, its gradient and its state alone,
    and from nothing of other parameters. Where ranks hold its parameters whole (`shard(whole=...)`), its `step()` then
    runs on each parameter's owner, on a plain tensor in its true shape; on the others that parameter has no gradient.

    Also a decorator of the class. A number that it computes over several parameters would be this rank's own."""
    _check_class("per_parameter", optimizer)
    _declared_by_parameter.add(optimizer)
    return optimizer


def _check_class(name: str, optimizer: Any) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise ShardingError(f"{name}(optimizer): {shown(optimizer)} is not a class of optimizers; give the class")


def is_elementwise(cls: type[Optimizer], step: Callable[..., Any] | None = None) -> bool:
    """Are optimizers of this class elementwise: was it declared, or is their update one of torch's own?

    `step`: the function that is about to run, by default that of the class."""
    if (cls, step) not in _found:
        _found[cls, step] = cls in _declared or any(_updates_as(cls, step or cls.step, own) for own in _TORCHS)
    return _found[cls, step]


def is_declared(cls: type[Optimizer]) -> bool:
    """Did the user declare the class elementwise?"""
    return cls in _declared


def is_per_parameter(cls: type[Optimizer], step: Callable[..., Any] | None = None) -> bool:
    """Do optimizers of this class work parameter by parameter: was it declared, or is the update one of torch's?"""
    own = step or cls.step
    return cls in _declared_by_parameter or any(_updates_as(cls, own, known) for known in _TORCHS_BY_PARAMETER)


def _updates_as(cls: type[Optimizer], step: Callable[..., Any], own: type[Optimizer]) -> bool:
    return issubclass(cls, own) and original_of(step) is original_of(own.step) and prepares_as(cls, own)
