"""Training: what runs before torch clips gradients and before it zeroes them."""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from retrograde.errors import InternalsChanged


def before_clipping(call: Callable[[list[torch.Tensor]], None]) -> None:
    """Have `call(parameters)` run before torch clips the gradients of these parameters.

    Assumes: `clip_grad_norm_` and `clip_grad_value_` are closures over the functions that do the work (`_no_grad`), so
    that changing the cell reaches everybody, however the name was imported and when.
    """
    cells = [_cell_of(public) for public in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)]
    for cell in cells:
        cell.cell_contents = _after_call(cell.cell_contents, call)


def _cell_of(public: Any) -> types.CellType:
    """Where a function keeps the one that does the work."""
    cells: tuple[types.CellType, ...] = public.__closure__ or ()
    inner = cells[0].cell_contents if len(cells) == 1 else None
    if not isinstance(inner, types.FunctionType) or inner.__name__ != public.__name__:
        raise InternalsChanged(f"torch.nn.utils.{public.__name__} is no longer a closure over what it does")
    return cells[0]


def _after_call(inner: Callable[..., Any], call: Callable[[list[torch.Tensor]], None]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def clip(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            call([parameters])
        elif given := list(parameters):
            call(given)
            parameters = given  # a generator is used up; torch warns of an empty one, which it still is
        return inner(parameters, *args, **kwargs)

    return clip


def before_zero_grad(call: Callable[[list[torch.Tensor]], None]) -> None:
    """Have `call(parameters)` run before any optimizer's or module's `zero_grad()`.

    Assumes: they inherit it. A class that has its own and does not call torch's is not seen.
    """
    of_optimizer, of_module = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(of_optimizer)
    def zero_optimizer(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        call([param for group in self.param_groups for param in group["params"]])
        of_optimizer(self, set_to_none)

    @functools.wraps(of_module)
    def zero_module(self: nn.Module, set_to_none: bool = True) -> None:
        call(list(self.parameters()))
        of_module(self, set_to_none)

    torch.optim.Optimizer.zero_grad = zero_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = zero_module  # type: ignore[method-assign]
