"""Cases that only make sense compiled: what Dynamo cannot put into one graph."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.patterns.context import Context
from tests.patterns.models import SPECS, Batch, Blocks, Mlp, MlpBlock, Spec
from tests.patterns.registry import Case, Phase


class LoopBlock(MlpBlock):
    """A graph break inside a for loop: Dynamo skips the frame."""

    def forward(self, h: Tensor) -> Tensor:
        for layer in (self.up, self.down):
            h_in = h
            torch._dynamo.graph_break()
            h = F.gelu(layer(h))
        return h + 0.5 * h_in.mean()


class WhileBlock(MlpBlock):
    """The same in a while loop, around code that touches a weight directly."""

    def forward(self, h: Tensor) -> Tensor:
        left = 2
        while left:
            left -= 1
            torch._dynamo.graph_break()
            h = h + F.linear(F.gelu(F.linear(h, self.up.weight, self.up.bias)), self.down.weight)
        return self.norm(h)


class DisabledBlock(MlpBlock):
    @torch.compiler.disable
    def inner(self, h: Tensor) -> Tensor:
        return super().inner(h)


class BranchBlock(MlpBlock):
    """The branch taken depends on the data."""

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm(h)
        if normed[0, 0] > 0:
            return h + self.inner(normed)
        return h - self.down(F.relu(self.up(normed)))


class EditedBlock(MlpBlock):
    """The forward edits weights: of a module before its use, and one whose use is over."""

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.25, 0.25)
        out = h + self.inner(self.norm(h))
        with torch.no_grad():
            self.down.bias.mul_(0.5)
        return out


class BrokenMlp(Mlp):
    def __init__(self, block: type[MlpBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))


class ParentReads(Mlp):
    """The parent's forward uses weights of its children: before, after and instead of their own forward.

    Dynamo cannot go on after the first read, which is in the midst of a call, and skips the frame. With plain
    parameters it would not, and inductor's kernels for one large graph round differently from those for its parts.
    """

    skipped_when_sharded = True

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.inp.weight) + self.inp.bias
        h = self.blocks[0](h + self.blocks[2].down.bias)
        h = F.linear(F.gelu(self.blocks[1].up(h)), self.blocks[1].down.weight)
        return self.head(self.blocks[2](h)) + self.blocks[0].up.weight.mean()


class Straight(Blocks):
    """No loop around the blocks: the parent's frame is cut into graphs instead of skipped."""

    def __init__(self) -> None:
        super().__init__(MlpBlock)
        self.inp = nn.Linear(6, 10)
        self.head = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](F.silu(self.inp(x))) * 2
        h = self.blocks[1](h).tanh()
        return self.head(self.blocks[2](h) + 1)


class OneUnit(nn.Module):
    """No repeated block: all of it is one unit and one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x)))


def trained(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


def retained(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.aux(out).backward()


def other_sizes(model: nn.Module, batch: Batch, ctx: Context) -> None:
    """Dynamo makes a size dynamic when it has seen a second one."""
    rows = 4 - ctx.step
    ctx.loss(model(batch.x[:rows]), Batch(batch.x[:rows], batch.y[:rows])).backward()


MODELS = {
    "loop": partial(BrokenMlp, LoopBlock),
    "while": partial(BrokenMlp, WhileBlock),
    "disabled": partial(BrokenMlp, DisabledBlock),
    "branch": partial(BrokenMlp, BranchBlock),
    "edited": partial(BrokenMlp, EditedBlock),
    "parent": ParentReads,
    "straight": Straight,
    "one-unit": OneUnit,
}
SPECS.update({f"compile-{name}": Spec(make) for name, make in MODELS.items()})

# A retained graph is the harder run; a weight that was edited cannot be used by a second backward.
_CASES = [
    Case("15b", name, f"compile-{name}", (Phase(trained if name == "edited" else retained),)) for name in MODELS
] + [Case("15", "sizes that change", "mlp", (Phase(other_sizes),))]
COMPILE_CASES = {case.id: case for case in _CASES}
