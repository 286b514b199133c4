"""So many real ranks on one machine for a few steps: `python -m benchmarks.many_ranks [--world 64] [--steps 2]`.

The result is compared with plain torch, bit for bit; time and memory are printed. A part of `make test-all`, under a
time limit of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from benchmarks.forked import play

WIDTH = 24
LR = 0.1


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return F.mse_loss(model(torch.randn(2, WIDTH, generator=draw)), torch.ones(2, WIDTH))


def plain(world: int, steps: int) -> list[Tensor]:
    """The ranks one after the other on the same weights, gradients summed in rank order and averaged."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    params = list(model.parameters())
    for step in range(steps):
        sums: list[Tensor] = []
        for rank in range(world):
            grads = torch.autograd.grad(loss_of(model, rank, step), params)
            sums = [total + grad for total, grad in zip(sums, grads, strict=True)] if sums else list(grads)
        for param, total in zip(params, sums, strict=True):
            param.grad = total / world
        optimizer.step()
    return [param.detach() for param in params]


def trained(rank: int, world: int, steps: int, stage: int, transport: str) -> tuple[list[Tensor], float]:
    """Final weights, and how long a step took."""
    model = build()
    engine = rg.shard(model, stage=stage, transport=transport, exact=True, timeout=300.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    began = time.monotonic()
    for step in range(steps):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.monotonic() - began) / steps
    with engine.full_params():
        whole = [param.detach().clone() for param in model.parameters()]
    return whole, seconds


def checked(rank: int, world: int, asked: argparse.Namespace) -> tuple[bool, float, int]:
    """Whether it is exact, how long a step took, and the bytes that this process has for itself."""
    weights, seconds = trained(rank, world, asked.steps, asked.stage, asked.transport)
    exact = all(map(torch.equal, weights, plain(world, asked.steps)))
    dist.barrier()
    return exact, seconds, private_bytes()


def private_bytes() -> int:
    """Of this process alone: what it shares with the one that forked it is left out."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--transport", default="one-sided", choices=("one-sided", "collective"))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all")
    asked = parser.parse_args()
    began = time.monotonic()
    answers = play(asked.world, asked.limit, partial(checked, asked=asked))
    exact = sum(each for each, _, _ in answers)
    slowest = max(seconds for _, seconds, _ in answers)
    private = sum(held for _, _, held in answers) / 2**30
    print(
        f"{asked.world} ranks, {asked.transport}, stage {asked.stage}: {exact} exact; a step took {slowest:.2f} s, all "
        f"{time.monotonic() - began:.0f} s; {private:.1f} GiB of their own, all ranks together"
    )
    return 0 if exact == asked.world else 1


if __name__ == "__main__":
    sys.exit(main())
