"""Plain and split backward of one module, side by side: models, inputs, and what compares them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters

MICROBATCHES = 3


class Apply(nn.Module):
    """A module from a function of (module, x) and named parameters or submodules."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


def tokens() -> Tensor:
    return torch.randn(4, 6, 8)


def image() -> Tensor:
    return torch.randn(3, 4, 6, 6)


def numbers() -> Tensor:
    return torch.randint(0, 7, (4, 6))


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def lin(i: int = 8, o: int = 8, bias: bool = True) -> nn.Linear:
    return nn.Linear(i, o, bias)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return module


def plain(model: nn.Module, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    outputs = [model(x) for x in inputs]
    for output, grad in zip(outputs, grads, strict=True):
        output.backward(grad)
    return [x.grad for x in inputs]


def split(model: nn.Module, inputs: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor | None], int]:
    """Forwards first, then every I, then every W."""
    parameters = StageParameters(model)
    runs = [SplitBackward(parameters) for _ in inputs]
    outputs = []
    for run, x in zip(runs, inputs, strict=True):
        with run.recording():
            outputs.append(model(x))
    for run, grad in zip(runs, grads, strict=True):
        run.run_inputs([outputs.pop(0)], [grad])
    waiting = runs[0].waiting
    for run in runs:
        run.run_weights()
        assert run.waiting_bytes == 0
    return [x.grad for x in inputs], waiting


def leaves(make: Callable[[], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    first = [make() for _ in range(MICROBATCHES)]
    return tuple([x.clone().requires_grad_(x.is_floating_point()) for x in first] for _ in range(2))  # type: ignore[return-value]


def assert_same(theirs: nn.Module, ours: nn.Module) -> None:
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or (torch.equal(a.grad, b.grad) and a.grad.stride() == b.grad.stride()), name


def attention(kind: str = "self", **options: Any) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        other = x.flip(1) if kind == "cross" else x
        return m.att(x, other, other, need_weights=kind == "weights")[0]

    return Apply(run, att=nn.MultiheadAttention(8, 2, batch_first=True, **options))


def experts(m: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    ends = torch.tensor([7, 7, rows.shape[0]], dtype=torch.int32)
    return F.grouped_mm(rows, m.w, offs=ends)


class Fused(torch.autograd.Function):
    """Computes both gradients at once, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, grads = x.flatten(0, 1), grad.flatten(0, 1)
        return grad @ weight, grads.t() @ rows, grads.sum(0)


def fused(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Fused.apply(x, weight, bias)


deferred = rg.defer(fused)
