"""Masters in a graph: their values, and the gradient's way through the page that is made of them."""

from typing import Any

import torch


def with_values_of(masters: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """`masters`, as if they had been computed from the full tensor `shown`: what flows back is rounded as its
    gradients are, and reduced with them."""
    return _Shown.apply(shown, masters)  # type: ignore[no-any-return, no-untyped-call]


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shown: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
        ctx.dtype = shown.dtype
        return masters

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None
