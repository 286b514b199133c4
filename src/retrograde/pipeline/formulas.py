"""The two gradients of each operation whose weight gradient can wait.

The formulas repeat torch's own choice of kernel and operand order (a gradient is column-major where its tensor is), so
that results agree to the last bit. A weight gradient never reads the weight: at stage 3 its values are on other ranks
by then.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class ParamGrads(NamedTuple):
    """Gradients of weight and bias."""

    weight: Tensor
    bias: Tensor | None


class GradientFormulas(Protocol):
    """The two halves of a deferrable call's backward."""

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads: ...


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def is_row_major(matrix: Tensor) -> bool:
    """Is the transpose of the matrix column-major?"""
    return matrix.stride(1) == 1 and matrix.stride(0) == matrix.shape[1]


def _times_right(grad: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """The gradient of `left` in left @ right."""
    return right.mm(grad.t()).t() if is_column_major(left) else grad.mm(right.t())


def _times_left(grad: Tensor, left: Tensor, column_major: bool) -> Tensor:
    """The gradient of the right factor, which is `column_major` or not, in left @ right."""
    return grad.t().mm(left).t() if column_major else left.t().mm(grad)


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ matrix + bias; the weight holds the matrix, or its transpose as in `F.linear`.

    `added`: the bias is added to the finished product, whose gradient is then summed for it as it lies in memory."""

    transposed: bool
    column_major: bool
    added: bool = False

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        matrix = weight.t() if self.transposed else weight
        return _times_right(_rows(grad), matrix, _rows(x)).reshape(x.shape)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        rows = _rows(grad)
        matrix = _times_left(rows, _rows(x), self.column_major)
        total = (grad.sum(tuple(range(grad.dim() - 1))) if self.added else rows.sum(0)) if bias else None
        return ParamGrads(matrix.t() if self.transposed else matrix, total)


@dataclass(frozen=True, slots=True)
class LeftFactor:
    """weight @ x, both matrices."""

    column_major: bool

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _times_left(grad, weight, is_column_major(x))

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
    """The weight gradient of an embedding."""

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
    """The weight gradient of a convolution."""

    geometry: Geometry
    weight_size: torch.Size
    weight_stride: tuple[int, ...]

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = self._backward(grad, x, weight, [True, False, False])[0]
        return found.view(x.shape)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        # Only the weight's size and layout matter here, and its values may be on other ranks.
        shape = torch.empty_strided(self.weight_size, self.weight_stride, dtype=grad.dtype, device=grad.device)
        _, weight, found = self._backward(grad, x, shape, [False, True, bias])
        return ParamGrads(weight, found)

    def _batch(self, tensor: Tensor) -> Tensor:
        """Add a batch dimension of one to a sample that has none."""
        return tensor if tensor.dim() == len(self.weight_size) else tensor.unsqueeze(0)

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        g = self.geometry
        grad, x = self._batch(grad), self._batch(x)
        channels = [grad.shape[1]] if wanted[2] else None
        where = (g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups)
        return torch.ops.aten.convolution_backward(grad, x, weight, channels, *where, wanted)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A batch of products of which each weight takes part in several: `weights` are the weight's batch dimensions."""

    left: bool
    weights: torch.Size

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        expanded = weight.expand(*x.shape[:-2], *weight.shape[-2:])
        return Batched(self.left).input_grad(_flat(grad), _flat(x), _flat(expanded)).view(x.shape)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        each = Batched(self.left).param_grads(_flat(grad), _flat(x), bias).weight
        whole = each.view(*x.shape[:-2], *each.shape[-2:])
        return ParamGrads(whole.sum_to_size(*self.weights, *each.shape[-2:]), None)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows of x in groups, each times a matrix of its own; `ends` says where the groups end."""

    ends: Tensor

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(grad, weight.mT, offs=self.ends)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        return ParamGrads(F.grouped_mm(x.mT, grad, offs=self.ends), None)
