"""The operations whose weight gradient can wait, and how a call of one is recognised.

A call is *deferrable* if it takes an input and a parameter, and its weight gradient is a function of the input and the
output's gradient alone: linear, convolution, embedding, matrix products; formulas.py has their gradients. Under
autocast this is asked of the call that autocast makes of it, with input and parameter in the lower precision.
Functions, and ways to call them, that are not recognised here are left to torch.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograde.pages.full_tensor import FullTensor
from retrograde.pipeline.formulas import (
    Batched,
    Broadcast,
    Convolution,
    Embedding,
    Geometry,
    GradientFormulas,
    Grouped,
    LeftFactor,
    Linear,
    is_column_major,
    is_row_major,
)
from retrograde.pipeline.inlined import for_each_dimension
from retrograde.torch_internals import base_of, grouped_mm


@dataclass(frozen=True, slots=True)
class DeferrableCall:
    """A recognised call. `dtype` is the dtype in which autocast has it compute; None if autocast leaves it alone.

    `dtype_of_result`: the call is of a user's function under autocast, so its dtype is known only when it has run."""

    formulas: GradientFormulas
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    dtype_of_result: bool = False


_PARAMETERS = (nn.Parameter, FullTensor)


def parameter_of(tensor: object) -> Tensor | None:
    """The trained parameter that `tensor` is, or is a view of.

    It is asked about every argument of every operation, so most answers come before `isinstance`, which for parameters
    runs Python code of torch."""
    if type(tensor) is nn.Parameter:
        return tensor if tensor.requires_grad else None
    if type(tensor) is Tensor:
        base = base_of(tensor)
        return base if base is not None and isinstance(base, _PARAMETERS) and tensor.requires_grad else None
    if not isinstance(tensor, Tensor) or not isinstance(tensor, _PARAMETERS):
        return None
    return tensor if tensor.requires_grad else None


def lower_precision(tensor: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts such a tensor; None if it leaves the tensor alone."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)


def _fits(x: object, weight: Tensor) -> bool:
    if type(x) is not Tensor or x.layout is not torch.strided or not x.is_floating_point():
        return False
    return (lower_precision(x) or x.dtype) == (lower_precision(weight) or weight.dtype)


def _cast_call(
    formulas: GradientFormulas, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> DeferrableCall | None:
    """The deferrable call of an operation that autocast runs in lower precision; None if the bias has another dtype."""
    if bias is not None and (lower_precision(bias) or bias.dtype) != (lower_precision(x) or x.dtype):
        return None
    return DeferrableCall(formulas, x, weight, bias, lower_precision(weight))


def _linear(input: Any, weight: Any, bias: Any = None) -> DeferrableCall | None:
    known = _fits(input, weight) and input.dim() >= 2 and weight.dim() == 2
    if not known or not (bias is None or (bias.dim() == 1 and bias.shape[0] == weight.shape[0])):
        return None
    added = bias is not None and input.dim() > 2 and not _is_contiguous_when_cast(input)
    return _cast_call(Linear(True, is_row_major(weight), added), input, weight, bias)


def _is_contiguous_when_cast(x: Tensor) -> bool:
    """Is what torch computes with contiguous? A cast closes gaps, and keeps the order of dimensions."""
    if x.is_contiguous() or lower_precision(x) in (None, x.dtype):
        return x.is_contiguous()
    return torch.empty_like(x, device="meta").is_contiguous()


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> DeferrableCall | None:
    known = _fits(mat1, mat2) and beta == 1 and alpha == 1 and input.dim() == 1 and input.shape[0] == mat2.shape[1]
    return _cast_call(Linear(False, is_column_major(mat2)), mat1, mat2, input) if known else None


def _matmul(input: Any, other: Any) -> DeferrableCall | None:
    if parameter_of(other) is not None:
        return _right_factor(input, other)
    if _fits(other, input):
        if input.dim() == 2 and other.dim() == 2:
            return _cast_call(LeftFactor(is_column_major(input)), other, input)
        return _batch_of_products(other, input, left=True)
    return None


def _right_factor(x: Any, weight: Tensor) -> DeferrableCall | None:
    if not _fits(x, weight):
        return None
    if weight.dim() == 2 and x.dim() >= 2:
        return _cast_call(Linear(False, is_column_major(weight)), x, weight)
    return _batch_of_products(x, weight, left=False)


def _batch_of_products(x: Tensor, weight: Tensor, left: bool) -> DeferrableCall | None:
    """Recognise batches of products whose factors have the same batch dimensions, or the weight fewer matrices."""
    if weight.dim() < 3 or x.dim() < 3:
        return None
    own, batch = weight.shape[:-2], x.shape[:-2]
    if own == batch and x.dim() == 3:
        return _cast_call(Batched(left), x, weight)
    fits = len(own) <= len(batch) and all(a in (1, b) for a, b in zip(reversed(own), reversed(batch), strict=False))
    return _cast_call(Broadcast(left, own), x, weight) if fits else None


def _mm(input: Any, mat2: Any, out_dtype: Any = None) -> DeferrableCall | None:
    return _matmul(input, mat2) if out_dtype is None else None


def _grouped(
    mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> DeferrableCall | None:
    """Recognise the products of a mixture of experts: sorted rows, and a matrix for each expert."""
    simple = bias is None and offs is not None and out_dtype is None
    if not simple or not _fits(mat_a, mat_b) or lower_precision(mat_a) is not None:
        return None
    return DeferrableCall(Grouped(offs), mat_a, mat_b) if mat_a.dim() == 2 and mat_b.dim() == 3 else None


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DeferrableCall | None:
    if max_norm is not None or sparse or type(input) is not Tensor:
        return None
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % rows
    return DeferrableCall(Embedding(rows, padding, scale_grad_by_freq), input, weight)


def _conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> DeferrableCall | None:
    dims = weight.dim() - 2
    spread = for_each_dimension(dilation, dims)
    around = _named_padding(padding, weight, spread) if isinstance(padding, str) else for_each_dimension(padding, dims)
    if around is None:
        return None
    geometry = Geometry(for_each_dimension(stride, dims), around, spread, False, [0] * dims, groups)
    return _convolution(input, weight, bias, geometry)


def _named_padding(name: str, weight: Tensor, dilation: list[int]) -> list[int] | None:
    """Padding in numbers. None if "same" needs more on one side than on the other: torch then pads the input first."""
    if name == "valid":
        return [0] * len(dilation)
    totals = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    return None if any(total % 2 for total in totals) else [total // 2 for total in totals]


def _conv_transpose(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> DeferrableCall | None:
    dims = weight.dim() - 2
    geometry = Geometry(
        for_each_dimension(stride, dims),
        for_each_dimension(padding, dims),
        for_each_dimension(dilation, dims),
        True,
        for_each_dimension(output_padding, dims),
        groups,
    )
    return _convolution(input, weight, bias, geometry)


def _convolution(x: Any, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> DeferrableCall | None:
    if not _fits(x, weight) or x.dim() not in (weight.dim(), weight.dim() - 1):
        return None
    return _cast_call(Convolution(geometry, weight.shape, weight.stride()), x, weight, bias)


_RECOGNISED: dict[Callable[..., Any], Callable[..., DeferrableCall | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    grouped_mm: _grouped,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _mm,
    torch.bmm: _mm,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _mm,
    Tensor.bmm: _mm,
    Tensor.addmm: _addmm,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.conv3d: _conv,
    torch.conv_transpose1d: _conv_transpose,
    torch.conv_transpose2d: _conv_transpose,
    torch.conv_transpose3d: _conv_transpose,
}
_Reader = Callable[..., DeferrableCall | None]
_REGISTERED: weakref.WeakKeyDictionary[Callable[..., Any], _Reader] = weakref.WeakKeyDictionary()


def register(func: Callable[..., Any], reader: _Reader) -> None:
    """Add a function whose calls `reader` recognises, for as long as the function is alive."""
    _REGISTERED[func] = reader


# Keywords that change what the call does; with one of them it is left to torch.
_FOREIGN = frozenset({"out"})


def recognise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferrableCall | None:
    """Return the deferrable call that this is, if its weight is a trained parameter and its gradient can wait."""
    reader = _RECOGNISED.get(func) or (_REGISTERED.get(func) if isinstance(func, FunctionType) else None)
    if reader is None or not _FOREIGN.isdisjoint(kwargs):
        return None
    if not any(parameter_of(value) is not None for value in (*args, *kwargs.values())):
        return None
    call = reader(*args, **kwargs)
    if call is None or parameter_of(call.weight) is None or parameter_of(call.x) is not None:
        return None
    return call
