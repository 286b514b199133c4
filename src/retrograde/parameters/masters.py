"""Masters as part of a graph: the result has their values, and its gradient goes to the page that is made of them."""

from typing import Any

import torch


def with_values_of(masters: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Return `masters` as if they had been computed from the full tensor `shown`: their gradient is cast to the dtype
    of `shown` and reduced with its other gradients."""
    return _Shown.apply(shown, masters)  # type: ignore[no-any-return, no-untyped-call]


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shown: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
        ctx.dtype = shown.dtype
        return masters

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None
