"""Puts the casts that autocast makes for deferrable calls into the graph, shared by uses as torch shares them.

[Note: autocast]
Under autocast a product takes two casts: one of its input and one of its weight. Autograd adds up the gradients of one
cast before it casts them back, so it matters which uses share one. Autocast shares the casts of a leaf as long as its
outermost region lasts, and no others.

Rule 1: a weight's cast is a node without data. The values are cast in F, and again in I, and are never kept: a graph
        holds the weight, which it holds anyway, and of a sharded weight a handle.
Rule 2: a full tensor stands for a leaf, so its casts are shared like a leaf's.
Rule 3: inputs are cast for each use, as torch does; consecutive uses share the values, not the node.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograde.pipeline.deferrable import parameter_of
from retrograde.pipeline.targets import SharedCast, cast_without_data
from retrograde.torch_internals import alias_without_base, autocast_region, version_of


class CastWeight(NamedTuple):
    """The cast of a weight in the graph of a forward."""

    tensor: Tensor
    shared: SharedCast | None


class _LastInput(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    values: Tensor


@dataclass
class Casts:
    """The casts of one forward, or of a recompute in I."""

    _region: Any = None
    _weights: dict[tuple[int, torch.dtype], CastWeight] = field(default_factory=dict)
    _last: _LastInput | None = None

    def of_weight(self, weight: Tensor, dtype: torch.dtype) -> CastWeight:
        if parameter_of(weight) is not weight:
            return CastWeight(cast_without_data(weight, dtype), None)  # a view is not a leaf
        region = autocast_region(weight.device)
        if region is not self._region:
            self._weights.clear()
            self._region = region
        key = (id(weight), dtype)  # parameters and full tensors outlive a forward
        if key not in self._weights:
            self._weights[key] = CastWeight(cast_without_data(weight, dtype), SharedCast())
        return self._weights[key]

    def of_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast an input, with the values of the last cast if it was of the same input (Rule 3)."""
        last = self._last
        known = last is not None and last.tensor() is x and last.version == version_of(x)
        if not known or last is None or last.values.dtype != dtype:
            last = self._last = _LastInput(weakref.ref(x), version_of(x), x.detach().to(dtype))
        lowered: Tensor = _Lowered.apply(x, last.values)  # type: ignore[no-untyped-call]
        return lowered

    def clear(self) -> None:
        self._region = None
        self._weights.clear()
        self._last = None


class _Lowered(torch.autograd.Function):
    """The cast of an input whose values in lower precision were computed before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        return alias_without_base(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None if grad is None else grad.to(ctx.dtype)), None
