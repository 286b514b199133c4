"""Does a long run stay as it is? `python -m benchmarks.steady [--steps 2000]`: memory and threads of two ranks.

A tiny model at each stage, by shared memory and by collectives over gloo: what a rank holds after a quarter of its
steps and at their end, private and shared with other ranks. What is held for each step would show as growth.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})

import torch
import torch.distributed as dist

import retrograde as rg
from benchmarks.forked import play
from benchmarks.many_ranks import LR, build, loss_of

LIMIT = 900.0  # seconds for one run
MOST = 2**20  # bytes that a rank may have gained: what allocators keep, not what steps leave behind
_KINDS = ("Private_Clean:", "Private_Dirty:", "Shared_Dirty:")


class Held(NamedTuple):
    nbytes: int
    descriptors: int
    threads: int


def _held() -> Held:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    nbytes = 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_KINDS))
    return Held(nbytes, len(list(Path("/proc/self/fd").iterdir())), threading.active_count())


def held(rank: int, world: int, stage: int, transport: str, steps: int) -> tuple[Held, Held]:
    """After a quarter of the steps, when threads and allocators have what they need, and after all."""
    model = build()
    rg.shard(model, stage=stage, transport=transport, timeout=60.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    first = None
    for number in range(steps):
        if number == steps // 4:
            first = _held()
        loss_of(model, rank, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    assert first is not None
    return first, _held()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    grew = False
    for transport in ("auto", "collective"):
        for stage in (1, 2, 3):
            found = play(2, LIMIT, lambda rank, world, at=stage, by=transport: held(rank, world, at, by, steps))
            more = max(last.nbytes - first.nbytes for first, last in found)
            same = all(last[1:] == first[1:] for first, last in found)
            grew |= more > MOST or not same
            print(f"stage {stage}, {transport}: {more / 1024:+.0f} KiB in {steps - steps // 4} steps; {found[0][1]}")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
