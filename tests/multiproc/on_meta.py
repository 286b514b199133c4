"""Models that are built on the meta device in tests, and functions that give them their first values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.small import Small

SEED = 41


class Tied(nn.Module):
    """The head shares the embedding's weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Small()
        self.body.head.weight = self.body.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids)


class Net(nn.Module):
    """Buffers, and modules whose reset is not a plain draw."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 3)
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)) for _ in range(3))
        self.memory = nn.LSTM(5, 4, num_layers=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.pair = nn.Bilinear(2, 3, 2)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.first.requires_grad_(False)
        self.rest = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.PReLU()) for _ in range(2))


class Shared(nn.Module):
    """One layer under two names, which draws its numbers once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again, self.last = self.first, nn.Linear(6, 6)


class Parent(nn.Module):
    """Its reset knows its children's shapes and sets some of them, as GPT's scaled initialisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 40)
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.second.weight, std=0.02)
        self.first.bias.data.zero_()
        nn.init.normal_(self.scale, std=self.second.weight.shape[0] ** -0.5)


class Container(nn.Module):
    """It has no parameters of its own, and draws those of its children again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 7) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]


class Transformer(nn.Transformer):
    """torch's own, whose reset goes over all parameters."""

    def __init__(self) -> None:
        super().__init__(8, 2, 1, 1, dim_feedforward=12)


MODELS = {
    "small": Small,
    "tied": Tied,
    "net": Net,
    "frozen": Frozen,
    "shared": Shared,
    "parent": Parent,
    "container": Container,
    "transformer": Transformer,
}


# ---- by a function of the user's
class Scale(nn.Module):
    """As transformers' norms and rotary embeddings: no reset, a weight, and a buffer that is not saved."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("frequencies", torch.arange(6.0), persistent=False)


class Unresettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Scale()) for _ in range(3))


def init_own(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Sequential):  # as GPT's scaled initialisation
        nn.init.normal_(module[0].weight, std=0.001)
    if isinstance(module, Scale):
        nn.init.uniform_(module.weight)
        module.frequencies.copy_(torch.arange(6.0))


# ---- memory
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(8))
        self.head = nn.Linear(64, 10)
