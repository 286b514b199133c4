"""Models of a recipe: tiny, of all the kinds of parameters that people have.

Where a recipe is exact, weights and data are small whole numbers in double precision: sums are exact then, in any
order. Otherwise they are random floats, and sums have to be made in torch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.fuzz.recipes import Recipe

WIDTH, FEATURES, BATCH = 3, 2, 2

Around = Callable[[int, Callable[[Tensor], Tensor], Tensor], Tensor]


class Block(nn.Module):
    """`kind` says what is special about it."""

    def __init__(self, kind: str, smooth: bool) -> None:
        super().__init__()
        self.kind = kind
        self.act: Callable[[Tensor], Tensor] = torch.tanh if smooth else torch.relu
        self.lin = nn.Linear(WIDTH, WIDTH)
        if kind in ("mlp", "nested"):
            self.more = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False))
        elif kind in ("lora", "norm"):
            self.lin.requires_grad_(False)
            self.down = nn.Linear(WIDTH, 1, bias=False)
            self.up = nn.Linear(1, WIDTH, bias=False)
        elif kind == "frozen":
            self.lin.requires_grad_(False)
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.ones(()))
        elif kind == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 3))
        elif kind == "unused":
            self.idle = nn.Parameter(torch.ones(5))

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "lora":
            return h + self.act(self.lin(h) + self.up(self.down(h)))
        if self.kind == "norm":  # what is frozen comes before what is trained
            return h + self.up(self.down(self.lin(h)))
        out = self.act(self.lin(h))
        if self.kind in ("mlp", "nested"):
            out = self.more(out)
        elif self.kind == "scalar":
            out = out * self.scale
        elif self.kind == "empty":
            out = out + self.nothing.sum()
        elif self.kind == "twice":
            out = self.act(self.lin(out))
        return h + out


class Nest(nn.Module):
    """A block inside another module that has parameters itself."""

    def __init__(self, smooth: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.inner = Block("nested", smooth)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h + self.shift)


class Model(nn.Module):
    def __init__(self, kinds: Sequence[str], smooth: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Nest(smooth) if kind == "nested" else Block(kind, smooth) for kind in kinds)
        self.head = nn.Linear(WIDTH, 2)
        tied = [block for kind, block in zip(kinds, self.blocks, strict=True) if kind == "tied"]
        for block in tied[1:]:
            block.lin.weight = tied[0].lin.weight

    def forward(self, x: Tensor, path: Sequence[int], around: Around) -> Tensor:
        h = self.inp(x)
        for place, index in enumerate(path):
            h = around(place, self.blocks[index], h)
        return self.head(h)


def build(recipe: Recipe) -> Model:
    torch.manual_seed(recipe.seed)
    model = Model(recipe.blocks, smooth=not recipe.exact)
    if recipe.exact:
        model.double()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randint(-1, 2, param.shape))
    return model


def batch(recipe: Recipe, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * recipe.seed + 100 * number + rank)
    if recipe.exact:
        x = torch.randint(-1, 2, (BATCH, FEATURES), generator=generator).double()
    else:
        x = torch.randn(BATCH, FEATURES, generator=generator).to(recipe.dtypes.page or torch.float32)
    return x.requires_grad_()


def units_of(recipe: Recipe) -> object:
    """What is given to `shard(units=...)`."""
    if recipe.units == "blocks":
        return lambda module: isinstance(module, Block | Nest)
    return [nn.Linear] if recipe.units == "linears" else "auto"
