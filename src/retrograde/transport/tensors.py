"""Tensors as they travel in a pipeline: their bytes in memory order, and memory to receive them in."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from retrograde.layout import is_dense
from retrograde.transport.messages import Form, MessageError, TensorLayout


def as_sent(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in memory order, one-dimensional; a copy only if it has gaps or overlaps."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def empty(layout: TensorLayout, device: torch.device) -> Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=device)


def space_for(form: Form, nbytes: int, device: torch.device) -> list[Tensor | None]:
    """Memory for those tensors of a message whose bytes travel beside it, if these are so many."""
    expected = _bytes_beside(form.tensors)
    if expected != nbytes:
        raise MessageError(f"{nbytes} bytes of tensors with a layout of {expected}")
    return [empty(layout, device) if layout is not None and layout.on_host else None for layout in form.tensors]


@lru_cache(1024)
def _bytes_beside(layouts: tuple[TensorLayout | None, ...]) -> int:
    """How many bytes of these tensors travel beside the message. Refuses layouts that no tensor is sent with."""
    total = 0
    for layout in layouts:
        if layout is not None:
            if len(layout.size) != len(layout.stride) or not is_dense(layout.size, layout.stride):
                raise MessageError(f"a tensor of shape {layout.size} and strides {layout.stride} was announced")
            if layout.on_host:
                total += layout.dtype.itemsize * math.prod(layout.size)
    return total


def copy_of(tensor: Tensor, layout: TensorLayout, device: torch.device) -> Tensor:
    """A copy of a tensor in memory of its own, in the memory order in which it would be received."""
    return empty(layout, device).copy_(tensor.detach())
