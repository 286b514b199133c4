"""What a step costs a rank as ranks become more: `python -m benchmarks.worlds [--worlds 2,4,8,16,32]`.

A model so small that computing it takes no time: what is left is what an engine does with the other ranks. FSDP2 and
retrograde by collectives go over the same backend, gloo, in the same processes, in turns; retrograde's own way within a
host is beside them. Ranks are many more than cores, so what is compared is processor time of a rank, all its threads
together, and how it grows from the first world on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median

if __name__ == "__main__":
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import retrograde as rg
from benchmarks.forked import play
from benchmarks.many_ranks import LR, build, loss_of
from benchmarks.report import Grid, ranged, wide_console
from benchmarks.stats import Spread

LIMIT = 900.0  # seconds for one world
STEPS = 3  # in a turn
ENGINES = ("fsdp2", "retrograde-3, collectives", "retrograde-3, shared memory")
Step = Callable[[int], None]


def _stepping(rank: int, world: int, engine: str) -> Step:
    """A model of this engine's, and a step of it."""
    model = build()
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        transport = "collective" if engine.endswith("collectives") else "auto"
        rg.shard(model, stage=3, transport=transport, timeout=LIMIT / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(number: int) -> None:
        loss_of(model, rank, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(rank: int, world: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of this rank's processor time for a step, of each engine and round."""
    steps = {engine: _stepping(rank, world, engine) for engine in ENGINES}
    found: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for turn in range(rounds + 1):
        for engine, step in steps.items():
            dist.barrier()
            began = time.process_time()
            for number in range(STEPS):
                step(number)
            if turn:  # the first one prepares
                found[engine].append((time.process_time() - began) / STEPS)
    return found


def over_ranks(answers: list[dict[str, list[float]]], engine: str) -> list[float]:
    """Of each round, the median rank."""
    return [median(of_ranks) for of_ranks in zip(*(answer[engine] for answer in answers), strict=True)]


def table(worlds: dict[int, dict[str, list[float]]]) -> Grid:
    first = next(iter(worlds.values()))
    rows = []
    for world, engines in worlds.items():
        for engine, rounds in engines.items():
            growth = Spread.of([now / then for now, then in zip(rounds, first[engine], strict=True)])
            rows.append((str(world), engine, f"{1e3 * median(rounds):.1f}", ranged(growth)))
    columns = ("ranks", "engine", "processor time of a rank, ms", f"÷ that of {next(iter(worlds))} ranks")
    return Grid("A step of a tiny model: median rank, median (lowest to highest round)", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    worlds: dict[int, dict[str, list[float]]] = {}
    console = wide_console()
    for world in map(int, asked.worlds.split(",")):
        answers = play(world, LIMIT, lambda rank, size: measured(rank, size, asked.rounds))
        worlds[world] = {engine: over_ranks(answers, engine) for engine in ENGINES}
        console.print(f"{world} ranks: measured", highlight=False)
    console.print(table(worlds).rich())
    print(table(worlds).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
