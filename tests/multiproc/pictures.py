"""A model whose weights do not lie row by row in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pictures(nn.Module):
    """Convolutions of several kinds, one of them with a 1×1 kernel, and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.point = nn.Conv2d(8, 6, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.matrix = nn.Parameter(torch.randn(5, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.first(x).relu())
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3)) @ self.matrix


def pictures(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return Pictures().to(memory_format=torch.channels_last)


def batch(rank: int, step: int = 0) -> Tensor:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return x.to(memory_format=torch.channels_last)
