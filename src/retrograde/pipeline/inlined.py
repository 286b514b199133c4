"""The code of a pipeline that Dynamo may trace: the mode around a stage's forward, and deferrable calls in graphs.

[Note: compiled regions]
Inside a graph there are no queues and no objects of ours. A deferrable call becomes the same call with a detached
weight, and a *tap* on its output, whose backward is the identity and one opaque operator:

    forward     y = linear(x, weight, bias)        nothing of it is opaque, so compilers fuse it as ever
    backward    x's gradient, by autograd          retrograde::record(grad, x, keys, ...), which hands on the pair

Rule 1: the operator's result is the gradient of `ANCHOR`, a leaf that stands for the queue. So no compiler removes it,
        and asking what becomes of that leaf tells what kind of backward runs (traced.py).
Rule 2: the graph has nothing that is about one stage, block or microbatch. It knows a parameter by its key, a number in
        a tensor that is an input of the graph, so that blocks of one kind share a graph.
Rule 3: two uses of a weight may have the same input and the same output gradient. Of calls that are alike compilers
        make one, so each call of the operator has an empty tensor of its own: `torch.empty` is not merged.

Dynamo skips all other code of retrograde (compiling/regions.py), so this module calls only torch.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from retrograde.compiling.inlined import KEY
from retrograde.torch_internals import transform_depth, unsafe_view

ANCHOR = torch.zeros(1, requires_grad=True)
Function = Callable[..., Any]


class RecordingMode(TorchFunctionMode):
    """The mode around a stage's forward. `eager` serves every call outside graphs; with `taps`, graphs defer too.

    `bodies`: functions of torch that hide deferrable calls, each with a function that makes these calls in the open."""

    def __init__(
        self,
        eager: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any],
        bodies: dict[Any, Function],
        taps: bool,
    ) -> None:
        super().__init__()
        self.eager = eager
        self.bodies = bodies
        self.taps = taps

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            return self.eager(func, args, kwargs)
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo does not see through the method under a mode: it calls `super()`
        # Inside torch.func a weight is differentiated by its transforms too, and a tap would hide it from them.
        if self.taps and torch.is_grad_enabled() and not transform_depth():
            if func in _TAPPED and "out" not in kwargs:
                return _TAPPED[func](func, *args, **kwargs)
            if func in self.bodies:
                with self:
                    return self.bodies[func](*args, **kwargs)
        return func(*args, **kwargs)


def told_to_modes(compute: Function) -> Function:
    """A function of input, weight and perhaps bias that torch-function modes see, as they see those of torch."""

    @functools.wraps(compute)
    def told(x: Any, weight: Any, bias: Any = None) -> Any:
        given = (x, weight) if bias is None else (x, weight, bias)
        if has_torch_function(given):
            return handle_torch_function(told, given, *given)
        return compute(*given)

    return told


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, keys: Tensor, anchor: Tensor, call: str, shape: list[int], numbers: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x, keys)
        ctx.call = call
        ctx.shape = shape
        ctx.numbers = numbers
        same: Tensor = unsafe_view(y, y.shape)  # an output of a Function that is a view could not be changed in place
        return same

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, keys = ctx.saved_tensors
        distinct = torch.empty(0)  # Rule 3
        record = torch.ops.retrograde.record(grad, x, keys, distinct, ctx.call, ctx.shape, ctx.numbers)
        return grad, None, None, record, None, None, None


def _is_parameter(tensor: Any) -> bool:
    """Is it a trained parameter, of a kind for which the formulas hold? They conjugate nothing."""
    return tensor.requires_grad and tensor.is_floating_point() and getattr(tensor, KEY, None) is not None


def _is_constant_or_parameter(bias: Any, size: int) -> bool:
    """May this bias be added to an output of `size` columns or channels? A trained one must be a vector of them."""
    if bias is None or not bias.requires_grad:
        return True
    return _is_parameter(bias) and bias.dim() == 1 and bias.shape[0] == size


def _lower(tensor: Any) -> Any:
    """Cast a tensor as autocast would."""
    if torch.is_autocast_enabled(tensor.device.type) and tensor.dtype is not torch.float64:
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))
    return tensor


def _tap(y: Any, x: Any, weight: Any, bias: Any, call: str, numbers: list[int]) -> Any:
    """Put a tap on `y`. Of the weight, its gradient needs only shape and strides."""
    keys = getattr(weight, KEY)
    if bias is not None and bias.requires_grad:
        keys = torch.cat([keys, getattr(bias, KEY)])
    shape = [*weight.shape, *weight.stride()]
    return _Tap.apply(y, x.detach(), keys, ANCHOR, call, shape, numbers)  # type: ignore[no-untyped-call]


def _plain(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach()


def _linear(func: Function, input: Any, weight: Any, bias: Any = None) -> Any:
    known = _is_parameter(weight) and weight.dim() == 2 and input.dim() >= 2
    if not known or not _is_constant_or_parameter(bias, weight.shape[0]):
        return func(input, weight, bias)
    x = _lower(input)
    return _tap(func(x, weight.detach(), _plain(bias)), x, weight, bias, "linear", [])


def _addmm(func: Function, input: Any, mat1: Any, mat2: Any, **scales: Any) -> Any:
    simple = not scales and input.dim() == 1 and _is_constant_or_parameter(input, mat2.shape[1])
    if not simple or not _is_parameter(mat2):
        return func(input, mat1, mat2, **scales)
    x = _lower(mat1)
    return _tap(func(input.detach(), x, mat2.detach()), x, mat2, input, "matmul", [])


def _matmul(func: Function, input: Any, other: Any) -> Any:
    matrices = other.dim() == 2 and input.dim() >= 2
    batches = other.dim() == 3 and input.dim() == 3 and input.shape[0] == other.shape[0]
    if not _is_parameter(other) or not (matrices or batches):
        return func(input, other)
    x = _lower(input)
    return _tap(func(x, other.detach()), x, other, None, "matmul" if matrices else "bmm", [])


def _mm(func: Function, input: Any, mat2: Any, out_dtype: Any = None) -> Any:
    return _matmul(func, input, mat2) if out_dtype is None else func(input, mat2, out_dtype=out_dtype)


def _embedding(
    func: Function,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    rest = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if not _is_parameter(weight) or max_norm is not None or sparse:
        return func(input, weight, *rest)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    numbers = [padding, int(scale_grad_by_freq)]
    return _tap(func(input, weight.detach(), *rest), input, weight, None, "embedding", numbers)


def for_each_dimension(value: Any, dims: int) -> list[int]:
    """Repeat an argument of a convolution that is one number for all dimensions."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _conv(
    func: Function,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dims = weight.dim() - 2
    known = _is_parameter(weight) and input.dim() == weight.dim() and not isinstance(padding, str)
    if not known or not _is_constant_or_parameter(bias, weight.shape[0]):
        return func(input, weight, bias, stride, padding, dilation, groups)
    x = _lower(input)
    numbers = [
        *for_each_dimension(stride, dims),
        *for_each_dimension(padding, dims),
        *for_each_dimension(dilation, dims),
        groups,
    ]
    y = func(x, weight.detach(), _plain(bias), stride, padding, dilation, groups)
    return _tap(y, x, weight, bias, "conv", numbers)


_TAPPED: dict[Any, Function] = {
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
    Tensor.addmm: _addmm,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.conv3d: _conv,
}
