"""Blocks of models that people train, as Hugging Face writes them, small: Llama, GPT-2, ViT, T5."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
HEADS = 4
BATCH = 2
TOKENS = 8


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().flatten(2)


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x.float() * scale).to(x.dtype)


def turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Llama(nn.Module):
    """Grouped queries, rotary positions, a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, half, False), nn.Linear(WIDTH, half, False)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, 3 * WIDTH, False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, False)
        self.before, self.after = RootMeanSquare(), RootMeanSquare()

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k = turned(heads(self.q_proj(y))), turned(heads(self.k_proj(y), HEADS // 2))
        k, v = (t.repeat_interleave(2, 1) for t in (k, heads(self.v_proj(y), HEADS // 2)))
        x = x + self.o_proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Gpt2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.mlp = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.c_attn(self.ln_1(x)).split(WIDTH, 2))
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        x = x + self.c_proj(merged(scores.softmax(-1).to(v.dtype) @ v))
        return x + self.mlp(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class VitBlock(nn.Module):
    """An attention module and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Vit(nn.Module):
    """Patches by a convolution, a class token, positions, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 1 + 4, WIDTH))
        self.block = VitBlock()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions)


class T5(nn.Module):
    """Positions by an embedding of distances, attention without scale, and one layer that looks at another text."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(8, HEADS)
        for name in ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, False))
        self.norms = nn.ModuleList(RootMeanSquare() for _ in range(3))
        self.wi_0, self.wi_1 = nn.Linear(WIDTH, 2 * WIDTH, False), nn.Linear(WIDTH, 2 * WIDTH, False)
        self.wo = nn.Linear(2 * WIDTH, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        there = torch.arange(x.shape[1])
        far = (there[None] - there[:, None]).abs().clamp(max=7)
        bias = self.distances(far).permute(2, 0, 1)[None]
        y = self.norms[0](x)
        x = x + self.o(self.attend(self.q(y), self.k(y), self.v(y), bias))
        other = x.flip(1)
        y = self.norms[1](x)
        x = x + self.cross_o(self.attend(self.cross_q(y), self.cross_k(other), self.cross_v(other), 0.0))
        y = self.norms[2](x)
        return x + self.wo(F.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
        scores = heads(q) @ heads(k).transpose(3, 2) + bias
        return merged(scores.float().softmax(-1).type_as(scores) @ heads(v))


ARCHITECTURES: dict[str, type[nn.Module]] = {"Llama": Llama, "GPT-2": Gpt2, "ViT": Vit, "T5": T5}


def input_of(name: str) -> Tensor:
    if name == "ViT":
        return torch.randn(BATCH, 3, 8, 8)
    return torch.randn(BATCH, TOKENS, WIDTH)
