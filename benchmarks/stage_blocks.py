"""The middle stage that split backward is measured on: transformer blocks with a choice of attention."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 4
TOKENS = 16
WIDTH = 64
HEADS = 4


class Block(nn.Module):
    """`kind`: "plain" (softmax by hand) or "sdpa"; `recompute`: None, "reentrant" or "other"."""

    def __init__(self, kind: str = "plain", recompute: str | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.kind = kind
        self.recompute = recompute
        self.runs = 0
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.recompute == "reentrant")

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        x = x + self.out(self.attend(self.ln1(x)))
        return x + self.down(F.gelu(self.up(self.ln2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, tokens, width)


def stage(kind: str = "plain", recompute: str | None = None, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind, recompute) for _ in range(blocks)))
