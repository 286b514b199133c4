"""The workload every contender trains: a GPT of 33.7M parameters on a fixed set of token batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    layers: int = 8
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    context: int = 128
    batch: int = 4  # sequences per rank and step
    lr: float = 3e-4
    seed: int = 0


FULL = Workload()
TINY = Workload(layers=2, width=64, heads=2, vocab=128, context=16, batch=2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Returns the loss, so that every engine wraps the whole of a rank's work."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(work.vocab, work.width)
        self.positions = nn.Embedding(work.context, work.width)
        self.blocks = nn.ModuleList(Block(work.width, work.heads) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.width)
        self.head = nn.Linear(work.width, work.vocab, bias=False)
        self.apply(_init)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(work: Workload) -> GPT:
    """The same weights on every rank and for every contender."""
    torch.manual_seed(work.seed)
    return GPT(work)


class Batches:
    """A few fixed batches per rank, repeated, so the loss falls and a contender that computes something
    else shows it. They are drawn beforehand: random numbers are not part of a step."""

    def __init__(self, work: Workload, rank: int, distinct: int = 4) -> None:
        draw = torch.Generator().manual_seed(1000 * (work.seed + 1) + rank)
        shape = (work.batch, work.context + 1)
        self._drawn = [torch.randint(work.vocab, shape, generator=draw) for _ in range(distinct)]
        self._next = 0

    def take(self) -> tuple[Tensor, Tensor]:
        tokens = self._drawn[self._next % len(self._drawn)]
        self._next += 1
        return tokens[:, :-1], tokens[:, 1:]
