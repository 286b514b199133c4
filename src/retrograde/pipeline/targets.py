"""Targets: the parameters to which waiting gradients go, through the view and the cast that the forward used.

A *target* refers to no memory of a page and to no graph of the forward. W builds the path to the parameter again from
nodes without data, so autograd sums, casts and accumulates as it would have done in an unsplit backward.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.errors import PipelineError
from retrograde.pages import FullTensor, Unit
from retrograde.pipeline.deferrable import parameter_of
from retrograde.torch_internals import has_hooks


class SharedCast:
    """A cast that several uses of a weight share under autocast: their gradients are added in the lower precision."""


@dataclass(frozen=True, slots=True)
class View:
    """Size, strides and offset of a view of a full tensor, whose page may be gone."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(part: Tensor, whole: Tensor) -> "View":
        return View(part.shape, part.stride(), int(part.storage_offset()) - int(whole.storage_offset()))


class Target:
    """A parameter whose gradient waits. It finds a full tensor by its place, since holding it would hold its page."""

    __slots__ = ("_slot", "_tensor", "_unit", "_view", "_view_hooked", "cast", "dtype")

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None, cast: SharedCast | None = None) -> None:
        whole = parameter_of(tensor)
        self._tensor: Tensor | None = None
        self._unit: weakref.ref[Unit] | None = None
        self._slot = 0
        self._view: View | None = None
        if isinstance(whole, FullTensor):
            self._unit = whole._unit
            self._slot = whole._slot
            self._view = None if whole is tensor else View.of(tensor, whole)
        else:
            self._tensor = tensor
        self._view_hooked = self._view is not None and _is_looked_at(tensor)
        self.dtype = dtype
        self.cast = cast

    @property
    def parameter(self) -> Tensor:
        """The parameter itself, or the full tensor of a sharded one."""
        if self._tensor is not None:
            whole = parameter_of(self._tensor)
            return self._tensor if whole is None else whole
        unit = self._unit() if self._unit is not None else None
        if unit is None:
            raise PipelineError("W of a stage whose sharded model is gone; keep the model until the step has ended")
        return unit.page.full_tensors[self._slot]

    @property
    def through_hooks(self) -> bool:
        """Has the view hooks, which autograd would call in I without a gradient?

        A view of a page is not kept: those count that it had when it was used."""
        tensor = self._tensor
        return self._view_hooked or (tensor is not None and not tensor.is_leaf and _is_looked_at(tensor))

    def reached(self, casts: dict[SharedCast, Tensor]) -> Tensor:
        """The tensor to which a node of W hands its gradient. `casts`: the shared casts that this W has made so far."""
        tensor = self.parameter if self._tensor is None else self._tensor
        if self._view is not None:
            tensor = _Part.apply(tensor, self._view)  # type: ignore[no-untyped-call]
        if self.dtype is None:
            return tensor
        if self.cast is None:
            return cast_without_data(tensor, self.dtype)
        if self.cast not in casts:
            casts[self.cast] = cast_without_data(tensor, self.dtype)
        return casts[self.cast]


def _is_looked_at(view: Tensor) -> bool:
    return has_hooks(view) or view.retains_grad


def overlaps(view: Tensor) -> bool:
    """May several elements of the view share memory?"""
    reach = 1
    for size, stride in sorted(zip(view.shape, view.stride(), strict=True), key=lambda each: each[1]):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, size * stride)
    return False


def may_be_target(tensor: Tensor) -> bool:
    """Can W make this parameter or view again? A view of a page must have its dtype and no overlaps."""
    whole = parameter_of(tensor)
    if whole is tensor or isinstance(whole, nn.Parameter):
        return True
    return whole is not None and tensor.dtype == whole.dtype and not overlaps(tensor)


def _shape_without_data(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device).expand(shape)


class _Part(torch.autograd.Function):
    """A view of a full tensor, as a node without data."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, view: View) -> Tensor:
        ctx.view = view
        ctx.shape = whole.shape
        return _shape_without_data(view.size, whole.dtype, whole.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = grad.new_zeros(ctx.shape)
        whole.as_strided(ctx.view.size, ctx.view.stride, ctx.view.offset).copy_(grad)
        return whole, None


def cast_without_data(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight in the graph only, without data. Its values are computed where they are needed, and not kept."""
    made: Tensor = _Cast.apply(weight, dtype)  # type: ignore[no-untyped-call]
    return made


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = weight.dtype
        return _shape_without_data(weight.shape, dtype, weight.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None if grad is None else grad.to(ctx.dtype)), None
