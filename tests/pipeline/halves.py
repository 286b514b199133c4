"""Plain and split backward of one module, side by side: models, inputs, and what compares them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
