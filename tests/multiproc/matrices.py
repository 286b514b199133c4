"""Optimizers that need whole matrices, beside AdamW for the rest, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import retrograde as rg
from tests.small import Small, build


class Shampoo(Optimizer):
    """A small one: factors of the gradient's own shape's sides, and momentum in the parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 2**-4})
        self.updated: list[torch.Size] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group["lr"])

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(param)
            state["left"] = torch.eye(param.shape[0])
            state["right"] = torch.eye(param.shape[1])
        state["step"] += 1
        state["left"].add_(grad @ grad.T)
        state["right"].add_(grad.T @ grad)
        update = _root(state["left"]) @ grad @ _root(state["right"])
        state["momentum"] = state["momentum"] * 0.5 + update  # another tensor than before
        param.sub_(state["momentum"], alpha=lr / state["step"])
        self.updated.append(param.shape)


@rg.per_parameter
class ShampooByOwners(Shampoo):
    """Declared."""


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=2**-10) ** -0.25) @ vectors.T


def matrices_of(model: Small) -> list[nn.Parameter]:
    return [param for param in model.blocks.parameters() if param.ndim == 2]


def with_adamw(make: Callable[[list[nn.Parameter]], Optimizer], model: Small) -> list[Optimizer]:
    """As they are used: a matrix optimizer for the matrices inside, AdamW for the rest."""
    matrices = matrices_of(model)
    listed = set(matrices)
    rest = [param for param in model.parameters() if param not in listed]
    return [make(matrices), torch.optim.AdamW(rest, lr=2**-4)]


MAKE: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "muon": lambda params: torch.optim.Muon(params, lr=2**-4),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=2**-4),
    "adafactor foreach": lambda params: torch.optim.Adafactor(params, lr=2**-4, foreach=True),
    "shampoo": ShampooByOwners,
    "shampoo, not declared": Shampoo,
    "adamw": lambda params: torch.optim.AdamW(params, lr=2**-4),
}


def sharded(stage: int, **options: Any) -> Small:
    model = build()
    rg.shard(model, stage, whole=matrices_of(model), **options)
    return model
