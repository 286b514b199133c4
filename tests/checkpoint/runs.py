"""Runs that are saved and loaded: a small model, the optimizers that checkpoints are tested with, and comparing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from retrograde.parameters import ShardedTensor
from tests.small import Small, batch, build, loss_of

State = dict[str, Any]


def _adamw(model: nn.Module) -> list[Optimizer]:
    """Two groups, as most have them."""
    flat = [param for param in model.parameters() if param.ndim < 2]
    rest = [param for param in model.parameters() if param.ndim > 1]
    return [torch.optim.AdamW([{"params": rest}, {"params": flat, "weight_decay": 0.0}], lr=2**-4)]


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)]


def _muon(model: nn.Module) -> list[Optimizer]:
    """It takes matrices, so another takes the rest."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    return [torch.optim.Muon(matrices, lr=2**-4), torch.optim.AdamW(rest, lr=2**-4)]


def _adafactor(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=2**-4)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "muon": _muon,
    "adafactor": _adafactor,
}


class Buffered(Small):
    """With a frozen parameter, buffers that are saved and that are not, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note, "numbers": [1, 2]}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def buffered(seed: int) -> Buffered:
    torch.manual_seed(seed)
    model = Buffered()
    model.count.fill_(seed)
    model.note = f"seed {seed}"
    return model


def new(seed: int) -> Small:
    return build(seed)


def train(model: nn.Module, optimizers: list[Optimizer], rank: int, *steps: int) -> None:
    for step in steps:
        loss_of(model, batch(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def whole(state: Any) -> Any:
    """The same with everything whole and plain. What is kept for a whole parameter has its owner alone."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items() if not _of_another(value)}
    if isinstance(state, list):
        return [whole(value) for value in state]
    if not isinstance(state, Tensor):
        return state
    if isinstance(state, ShardedTensor) and state.unit.layout.shard_of is not None:
        return state.put_together([state.local]).clone()
    if isinstance(state, ShardedTensor | DTensor):
        state = state.full_tensor()
    return state.detach().clone()


def _of_another(value: Any) -> bool:
    if not isinstance(value, ShardedTensor) or value.unit.layout.shard_of is None:
        return False
    return value.unit.layout.shard_with(value.place) != value.unit.rank


def merged(by_rank: Sequence[State]) -> State:
    """What all ranks have of `everything`, who have to agree where several have something."""
    model = by_rank[0]["model"]
    optimizers = []
    assert all(differences(model, other["model"]) == [] for other in by_rank)
    for states in zip(*(each["optimizers"] for each in by_rank), strict=True):
        kept: dict[int, State] = {}
        for number, key, value in (
            (n, k, v) for each in states for n, s in each["state"].items() for k, v in s.items()
        ):
            known = kept.setdefault(number, {}).setdefault(key, value)
            assert differences(known, value) == [], (number, key)
        ordered = {number: dict(sorted(state.items())) for number, state in sorted(kept.items())}
        optimizers.append({**states[0], "state": ordered})
    return {"model": model, "optimizers": optimizers}


def everything(model: nn.Module, optimizers: list[Optimizer]) -> State:
    """All of it, on every rank. `params` are numbers."""
    return {
        "model": whole(dict(model.state_dict())),
        "optimizers": [whole(optimizer.state_dict()) for optimizer in optimizers],
    }


def differences(one: Any, other: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Bit for bit, unless a tolerance is given."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(one.keys() ^ other.keys(), key=str)}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}", tolerance)]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = list(zip(one, other, strict=True))
        return [
            found for number, pair in enumerate(pairs) for found in differences(*pair, f"{path}.{number}", tolerance)
        ]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and _equal(one, other, tolerance)
    else:
        alike = one == other
    return [] if alike else [path]


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if tolerance == 0:
        return torch.equal(one, other)
    return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance)
