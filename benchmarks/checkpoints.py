"""`python -m benchmarks.checkpoints`: saving and loading beside FSDP2 with torch.distributed.checkpoint, in one run.

The same model and AdamW state on the same two ranks, both written to files that are synced to the disk. In a round each
contender saves and loads once, in turns; a ratio is one between measurements of the same round. *Peak* is how far the
memory of a rank's process rises above what it was before the call. What is loaded into has its optimizer's state.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import retrograde as rg
from benchmarks import meters
from benchmarks.blocks import Block

WORLD = 2
WIDTH, BLOCKS = 768, 6


@dataclass(frozen=True)
class Contender:
    """Two calls that take a path."""

    save: Callable[[str], object]
    load: Callable[[str], object]


def _trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))


def _retrograde() -> Contender:
    model = _build()
    rg.shard(model, 3)
    optimizer = _trained(model)
    return Contender(lambda path: rg.save(path, model, optimizer), lambda path: rg.load(path, model, optimizer))


def _fsdp2() -> Contender:
    model = _build()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = _trained(model)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def load(path: str) -> None:
        asked = state()
        dcp.load(asked, checkpoint_id=path)
        model.load_state_dict(asked["model"])
        set_optimizer_state_dict(model, optimizer, asked["optimizer"])

    return Contender(lambda path: dcp.save(state(), checkpoint_id=path), load)


CONTENDERS = {"retrograde": _retrograde, "FSDP2": _fsdp2}


def _measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and bytes by which this process has grown at its peak."""
    meters.return_free_memory()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = meters.memory_bytes("VmRSS")
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start, meters.memory_bytes("VmHWM") - before


def _rank(rank: int, port: int, folder: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    contenders = {name: make() for name, make in CONTENDERS.items()}
    found: list[tuple[str, str, float, int]] = []
    for number in range(rounds + 1):
        for name in sorted(contenders, reverse=number % 2 == 1):
            path = f"{folder}/{name}"
            for what, work in (("save", contenders[name].save), ("load", contenders[name].load)):
                seconds, peak = _measured(lambda work=work, path=path: work(path))
                if number:  # the first imports and warms up
                    found.append((name, what, seconds, peak))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
            dist.barrier()
    results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def table(found: list[tuple[str, str, float, int]], size: int) -> str:
    lines = ["| | MB/s | peak, MiB | time ÷ FSDP2's, median (lowest to highest) |", "|---|---:|---:|---:|"]
    for what in ("save", "load"):
        own = {name: [each for each in found if each[:2] == (name, what)] for name in CONTENDERS}
        for name, measured in own.items():
            speed = median(size / seconds / 1e6 for _, _, seconds, _ in measured)
            peak = median(peak for *_, peak in measured) / 2**20
            ratios = sorted(one[2] / other[2] for one, other in zip(measured, own["FSDP2"], strict=True))
            spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            lines.append(f"| {what}, {name} | {speed:.0f} | {peak:.1f} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=arguments.folder) as folder:
        mp.spawn(_rank, (store.port, folder, arguments.rounds, results), nprocs=WORLD)
    size = 3 * sum(param.numel() for param in _build().parameters()) * 4
    by_rank = [results.get() for _ in range(WORLD)]
    worst = [max(pair, key=lambda each: each[3]) for pair in zip(*by_rank, strict=True)]
    print(f"{size / 1e6:.0f} MB of weights and AdamW state, {WORLD} ranks, {arguments.rounds} rounds\n")
    print(table(worst, size))


if __name__ == "__main__":
    main()
