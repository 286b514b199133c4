"""Operators that torch composes of others, and would compose differently on a device that is not the CPU.

Where torch asks for kernels that only GPUs have (LSTM), or uses ones with other last bits (dropout), the device takes
the CPU's route instead, in operators that are queued one by one. Autocast is here, too: torch has a table of operators
for each kind of device it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LSTM = 2  # oneDNN's number for this kind of layer

# Operators whose inputs torch.autocast makes bf16 or fp16, and those whose inputs it makes fp32.
_LOWER_PRECISION = ("linear", "matmul", "mm", "bmm", "addmm", "conv2d", "scaled_dot_product_attention")
_FLOAT32 = ("cross_entropy_loss", "layer_norm", "softmax.int", "nll_loss", "mse_loss")

_libraries: list[torch.library.Library] = []  # what they register ends with them


def register() -> None:
    # The first key is for tensors that autograd watches, the second for those of inference mode.
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library = _library("aten", key)
        library.impl("dropout", _dropout)
        library.impl("lstm.input", _lstm)
    _library("_", "AutocastPrivateUse1").fallback(torch.library.fallthrough_kernel)
    autocast = _library("aten", "AutocastPrivateUse1")
    for name in _LOWER_PRECISION:
        autocast.impl(name, _casting(name, lambda: torch.get_autocast_dtype("late")))
    for name in _FLOAT32:
        autocast.impl(name, _casting(name, lambda: torch.float32))


def _library(namespace: str, key: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL", key)
    _libraries.append(library)
    return library


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    return x * noise


def _lstm(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer by layer with oneDNN's kernel, as on the CPU."""
    if len(weights) != num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2):
        raise NotImplementedError("the late device has no LSTM with projections")
    hidden, cell = (each.contiguous() for each in state)
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    directions = 2 if bidirectional else 1
    options = (_LSTM, hidden.size(2), num_layers, has_biases, bidirectional, batch_first, train)
    last = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            inputs = (x, *_layer_weights(weights, number, has_biases), hidden[number], cell[number])
            output, *ends, _ = torch.mkldnn_rnn_layer(*inputs, direction > 0, [], *options)
            outputs.append(output)
            last.append(ends)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    last_hidden, last_cell = map(torch.stack, zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x), last_hidden, last_cell


def _layer_weights(weights: Sequence[Tensor], number: int, has_biases: bool) -> list[Tensor]:
    if has_biases:
        return list(weights[4 * number : 4 * number + 4])
    pair = list(weights[2 * number : 2 * number + 2])
    return pair + [torch.zeros_like(weight) for weight in pair]


def _casting(name: str, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype()

        def cast(value: Any) -> Any:
            is_number = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "late"
            return value.to(wanted) if is_number else value

        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return run
