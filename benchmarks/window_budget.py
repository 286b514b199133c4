"""`python -m benchmarks.window_budget`: reductions and bytes of a window against the memory it may use.

Counts and bytes only, so it does not matter how busy the machine is. The table is in docs/design/gradients.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import retrograde as rg
from benchmarks.model import Batches, Workload, build

WORK = Workload(layers=8, width=256, heads=4, vocab=2048, context=32, batch=1)
PARTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
MIB = 2**20


def _row(engine: rg.Engine, batches: Batches, backwards: int, budget: float) -> list[str]:
    engine.ledger.clear()
    waiting = 0
    with engine.coalesce(budget=budget):
        for _ in range(backwards):
            engine.model(*batches.take()).backward()
            waiting = max(waiting, sum(engine.pending.bytes_waiting.values()))
    engine.model.zero_grad()
    ledger = engine.ledger
    once = sum(ledger.count("reduce", unit.name) == 1 for unit in engine.units)
    return [
        f"{budget / MIB:.1f}",
        f"{waiting / MIB:.1f}",
        f"{once} of {len(engine.units)}",
        f"{ledger.count('reduce')}",
        f"{ledger.bytes('reduce') / MIB:.1f}",
        f"{ledger.count('agree')}",
    ]


def _rank(rank: int, world: int, stage: int, backwards: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = build(WORK)
    engine = rg.shard(model, stage)
    batches = Batches(WORK, rank)
    whole = sum(unit.layout.page_bytes for unit in engine.units)
    rows = [_row(engine, batches, backwards, part * whole) for part in PARTS]
    if rank == 0:
        heads = ("budget, MiB", "waiting, MiB", "units reduced once", "reductions", "MiB sent per rank", "meetings")
        print(f"stage {stage}, {world} ranks, {backwards} backwards, all gradients {whole / MIB:.1f} MiB\n")
        for row in (heads, ("---:",) * len(heads), *rows):
            print("| " + " | ".join(row) + " |")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--backwards", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        args = (options.world, options.stage, options.backwards, store)
        mp.spawn(_rank, args=args, nprocs=options.world)


if __name__ == "__main__":
    main()
