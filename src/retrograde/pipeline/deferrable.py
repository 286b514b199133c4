"""The operations whose weight gradient can wait: how each is recognised and what its two gradients are.

A call is *deferrable* if it takes an input and a parameter, and its weight gradient is a function of the input and the
output's gradient alone: linear, convolution, embedding, matrix products. The formulas repeat torch's own choice of
kernel and operand order (a gradient is column-major where its tensor is), so that results agree to the last bit.
Whatever is not recognised here, or is called in a way that is not, is left to torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograde.pages.full_tensor import FullTensor
from retrograde.torch_internals import base_of


class ParamGrads(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class GradientFormulas(Protocol):
    """The two halves of a deferrable call's backward."""

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads: ...


@dataclass(frozen=True, slots=True)
class DeferrableCall:
    """A recognised call."""

    formulas: GradientFormulas
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None


def parameter_of(tensor: object) -> Tensor | None:
    """The trained parameter that `tensor` is, or is a view of."""
    if type(tensor) is not Tensor:
        return tensor if isinstance(tensor, nn.Parameter | FullTensor) and tensor.requires_grad else None
    base = base_of(tensor)
    # A view of a page would keep the page in memory until W, so it is left to torch.
    return base if isinstance(base, nn.Parameter) and tensor.requires_grad else None


def _fits(x: object, weight: Tensor) -> bool:
    return type(x) is Tensor and x.layout is torch.strided and x.dtype == weight.dtype and x.is_floating_point()


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _times_right(grad: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """The gradient of `left` in left @ right."""
    return right.mm(grad.t()).t() if _column_major(left) else grad.mm(right.t())


def _times_left(grad: Tensor, left: Tensor, column_major: bool) -> Tensor:
    """The gradient of the right factor, which is `column_major` or not, in left @ right."""
    return grad.t().mm(left).t() if column_major else left.t().mm(grad)


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ matrix + bias; the weight holds the matrix, or its transpose as in `F.linear`."""

    transposed: bool
    column_major: bool

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        matrix = weight.t() if self.transposed else weight
        return _times_right(_rows(grad), matrix, _rows(x)).reshape(x.shape)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        grad = _rows(grad)
        matrix = _times_left(grad, _rows(x), self.column_major)
        return ParamGrads(matrix.t() if self.transposed else matrix, grad.sum(0) if bias else None)


@dataclass(frozen=True, slots=True)
class LeftFactor:
    """weight @ x, both matrices."""

    column_major: bool

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _times_left(grad, weight, _column_major(x))

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        return ParamGrads(x.mm(grad.t()).t() if self.column_major else grad.mm(x.t()), None)


@dataclass(frozen=True, slots=True)
class Batched:
    """A batch of matrix products; the weight is the left or the right factor of each."""

    left: bool

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return weight.mT.bmm(grad) if self.left else grad.bmm(weight.mT)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        return ParamGrads(grad.bmm(x.mT) if self.left else x.mT.bmm(grad), None)


@dataclass(frozen=True, slots=True)
class Embedding:
    rows: int
    padding: int
    by_frequency: bool

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        found = torch.ops.aten.embedding_backward(grad, x, self.rows, self.padding, self.by_frequency, False)
        return ParamGrads(found, None)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The arguments of a convolution, one number per dimension, as `convolution_backward` takes them."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


@dataclass(frozen=True, slots=True)
class Convolution:
    geometry: Geometry
    weight_size: torch.Size
    weight_stride: tuple[int, ...]

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = self._backward(grad, x, weight, [True, False, False])[0]
        return found

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        # Only the weight's size and layout matter here, and its values may be on other ranks.
        shape = torch.empty_strided(self.weight_size, self.weight_stride, dtype=grad.dtype, device=grad.device)
        _, weight, found = self._backward(grad, x, shape, [False, True, bias])
        return ParamGrads(weight, found)

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        g = self.geometry
        channels = [grad.shape[1]] if wanted[2] else None
        where = (g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups)
        return torch.ops.aten.convolution_backward(grad, x, weight, channels, *where, wanted)


def _linear(input: Any, weight: Any, bias: Any = None) -> DeferrableCall | None:
    known = _fits(input, weight) and input.dim() >= 2 and weight.dim() == 2
    if not known or not (bias is None or (bias.dim() == 1 and bias.shape[0] == weight.shape[0])):
        return None
    return DeferrableCall(Linear(True, _column_major(weight.t())), input, weight, bias)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> DeferrableCall | None:
    known = _fits(mat1, mat2) and beta == 1 and alpha == 1 and input.dim() == 1 and input.shape[0] == mat2.shape[1]
    return DeferrableCall(Linear(False, _column_major(mat2)), mat1, mat2, input) if known else None


def _matmul(input: Any, other: Any) -> DeferrableCall | None:
    if parameter_of(other) is not None:
        return _right_factor(input, other)
    if _fits(other, input):
        if input.dim() == 2 and other.dim() == 2:
            return DeferrableCall(LeftFactor(_column_major(input)), other, input)
        if input.dim() == 3 and other.dim() == 3 and input.shape[0] == other.shape[0]:
            return DeferrableCall(Batched(True), other, input)
    return None


def _right_factor(x: Any, weight: Tensor) -> DeferrableCall | None:
    if _fits(x, weight):
        if weight.dim() == 2 and x.dim() >= 2:
            return DeferrableCall(Linear(False, _column_major(weight)), x, weight)
        if weight.dim() == 3 and x.dim() == 3 and x.shape[0] == weight.shape[0]:
            return DeferrableCall(Batched(False), x, weight)
    return None


def _mm(input: Any, mat2: Any) -> DeferrableCall | None:
    return _matmul(input, mat2)


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


def _spread(value: int | Sequence[int], dims: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> DeferrableCall | None:
    if isinstance(padding, str):
        return None
    dims = weight.dim() - 2
    zero = [0] * dims
    geometry = Geometry(_spread(stride, dims), _spread(padding, dims), _spread(dilation, dims), False, zero, groups)
    return _convolution(input, weight, bias, geometry)


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
        _spread(stride, dims),
        _spread(padding, dims),
        _spread(dilation, dims),
        True,
        _spread(output_padding, dims),
        groups,
    )
    return _convolution(input, weight, bias, geometry)


def _convolution(x: Any, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> DeferrableCall | None:
    if not _fits(x, weight) or x.dim() != weight.dim():
        return None
    return DeferrableCall(Convolution(geometry, weight.shape, weight.stride()), x, weight, bias)


_RECOGNISED: dict[Callable[..., Any], Callable[..., DeferrableCall | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _mm,
    torch.bmm: _mm,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _mm,
    Tensor.bmm: _mm,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.conv3d: _conv,
    torch.conv_transpose1d: _conv_transpose,
    torch.conv_transpose2d: _conv_transpose,
    torch.conv_transpose3d: _conv_transpose,
}
# Keywords that change what the call does; with one of them it is left to torch.
_FOREIGN = frozenset({"out", "out_dtype"})


def recognise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferrableCall | None:
    """This call's parts and formulas, if its weight is a trained parameter and its gradient can wait."""
    reader = _RECOGNISED.get(func)
    if reader is None or not _FOREIGN.isdisjoint(kwargs):
        return None
    if not any(parameter_of(value) is not None for value in (*args, *kwargs.values())):
        return None
    call = reader(*args, **kwargs)
    if call is None or parameter_of(call.weight) is None or parameter_of(call.x) is not None:
        return None
    return call
