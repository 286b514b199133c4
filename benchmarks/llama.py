"""A model with the shape of Llama 3.1, written by hand: RMSNorm, rotary embeddings, grouped queries, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_heads: int = 8  # each serves as many query heads as there are more of them
    hidden: int = 14336
    vocab: int = 128256
    context: int = 8192
    batch: int = 1  # sequences per rank and step
    theta: float = 500000.0


EIGHT_BILLION = Shape()
TINY = Shape(layers=2, width=32, heads=4, key_heads=2, hidden=64, vocab=64, context=16)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.grouped = shape.key_heads < shape.heads
        self.queries = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.keys = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.values = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.out = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head).transpose(1, 2)

        q, k = (rotated(split(part(x)), cos, sin) for part in (self.queries, self.keys))
        v = split(self.values(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """What every engine makes a unit of."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.norm2 = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = SwiGLU(shape.width, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Returns the loss. `recompute`: blocks keep their inputs only, and run again in backward."""

    def __init__(self, shape: Shape, recompute: bool) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = turns(self.shape, tokens.shape[1], x)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute else block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def turns(shape: Shape, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """By how much each pair of a head's elements is turned at each place."""
    head = shape.width // shape.heads
    speeds = shape.theta ** (-torch.arange(0, head, 2, device=like.device, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), speeds)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
