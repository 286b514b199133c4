"""Frozen weights among trained ones: each page comes once in a backward and none is left behind by it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks

BLOCKS, DIM = 6, 8


class LoraBlock(nn.Module):
    """A frozen weight beside two trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class FrozenNormBlock(nn.Module):
    """A frozen norm in front of what is trained: its gradient is the last thing a backward computes here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class FrozenBlock(LoraBlock):
    """Nothing is trained: a backward only passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Stack(nn.Module):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


STACKS: dict[str, tuple[type[nn.Module], ...]] = {
    "lora": (LoraBlock,) * BLOCKS,
    "frozen norm": (FrozenNormBlock,) * BLOCKS,
    "frozen block in the middle": (LoraBlock, LoraBlock, FrozenBlock, FrozenBlock, LoraBlock, LoraBlock),
    "frozen blocks at the end": (LoraBlock, LoraBlock, LoraBlock, LoraBlock, FrozenBlock, FrozenBlock),
}


def _pages(engine: rg.Engine) -> list[str]:
    return [unit.name for unit in engine.units if unit.page.ready and not unit.stays]


def _backwards(rank: int, world: int, name: str, prefetch: bool, retain: bool, wrt: str) -> list[str]:
    """Three steps; in each, what a backward gathers beyond what the forward has left, and what it leaves itself."""
    torch.manual_seed(0)
    model = Stack(*STACKS[name])
    engine = rg.shard(model, 3, units=lambda m: isinstance(m, LoraBlock | FrozenNormBlock), prefetch=prefetch)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    faults = []
    for step in range(3):
        x = torch.full((2, DIM), 0.1 * (rank + 1), requires_grad=True)
        loss = model(x).sum()
        for _ in range(2 if retain else 1):
            there = len(_pages(engine))
            before = engine.ledger.count("gather")
            if wrt == "x":
                torch.autograd.grad(loss, x, retain_graph=retain)
            else:
                loss.backward(retain_graph=retain)
            gathers = engine.ledger.count("gather") - before
            if step > 0 and gathers != BLOCKS - there:
                faults.append(f"step {step}: {gathers} gathers where {BLOCKS - there} are needed")
            if left := _pages(engine):
                faults.append(f"step {step}: {left} left behind")
        del loss
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return faults


@pytest.mark.parametrize("wrt", ("parameters", "x"))
@pytest.mark.parametrize("retain", (False, True))
@pytest.mark.parametrize("prefetch", (False, True))
@pytest.mark.parametrize("name", STACKS)
def test_a_page_comes_once_and_goes(ranks: Ranks, name: str, prefetch: bool, retain: bool, wrt: str) -> None:
    assert ranks(2).run(_backwards, name, prefetch, retain, wrt) == [[], []]
