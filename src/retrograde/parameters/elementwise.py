"""Which optimizers work element by element."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from retrograde.errors import ShardingError
from retrograde.torch_internals import original_of, prepares_as

C = TypeVar("C", bound=type[Optimizer])

# torch's own that compute each element of a parameter from that element of its gradient and of its state.
_TORCHS = tuple(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
_declared: set[type[Optimizer]] = set()


def elementwise(optimizer: C) -> C:
    """Declare that an optimizer's class computes each element of a parameter from that element alone (of its gradient
    and of its state). Its `step()` then runs on plain local tensors, as those of torch's own do.

    Also a decorator of the class. A number that it computes over a whole tensor, a norm for instance, would be this
    rank's own."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise ShardingError(f"elementwise(optimizer): {optimizer!r} is not a class of optimizers; give the class")
    _declared.add(optimizer)
    return optimizer


def is_declared(optimizer: Optimizer) -> bool:
    return type(optimizer) in _declared


def is_elementwise(optimizer: Optimizer, step: Callable[..., Any] | None = None) -> bool:
    """Does this optimizer work so? It was declared, or its update is one of torch's own.

    `step`: the function that is about to run; its class's if it is not given."""
    if is_declared(optimizer):
        return True
    cls = type(optimizer)
    written = original_of(cls.step if step is None else step)
    return any(issubclass(cls, own) and written is original_of(own.step) and prepares_as(cls, own) for own in _TORCHS)
