"""Small models of the kinds that DeepSpeed's tests of backward have: checkpoints, frozen parts, several outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 8
Make = Callable[[], nn.Module]


def inputs(rank: int, step: int = 0, needs_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, DIM, generator=generator).requires_grad_(needs_grad)


class TwoLayers(nn.Module):
    """No loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(DIM, DIM)
        self.linear2 = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x))


class Checkpointed(nn.Module):
    """A part of the forward is run again in backward. Subclasses say which."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.head = nn.Linear(DIM, DIM)

    def part(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, x, use_reentrant=self.reentrant))


class PlainPart(Checkpointed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.linear = nn.Linear(DIM, DIM)

    def part(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class FrozenNorm(Checkpointed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.linear = nn.Linear(DIM, DIM)

    def part(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(self.norm(x)))


class Adapter(Checkpointed):
    """A frozen base and a trained low-rank part."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.base = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def part(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.left = nn.Linear(DIM, DIM)
        self.right = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        return self.left(normed), self.right(normed)


class SeveralOutputs(Checkpointed):
    """A block that returns two tensors, inside a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.block = TwoOutputs()

    def part(self, x: Tensor) -> Tensor:
        left, right = self.block(x)
        return left + right


class Blocks(nn.Module):
    """Several checkpoints, each with a frozen norm: repeated blocks are units."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(FrozenNorm(reentrant) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block.part, x, use_reentrant=self.reentrant)
        return x


def checkpointed_models(reentrant: bool) -> dict[str, Make]:
    kinds = (PlainPart, FrozenNorm, Adapter, SeveralOutputs, Blocks)
    return {kind.__name__: _seeded(kind, reentrant) for kind in kinds}


def _seeded(kind: type[nn.Module], *args: bool) -> Make:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return kind(*args)

    return make


def two_layers(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return TwoLayers()
