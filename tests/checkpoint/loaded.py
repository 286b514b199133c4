"""What is loaded is what was saved, bit for bit, and training goes on as if nothing had been: the whole table.

    python -m tests.checkpoint.loaded [--kinds muon adamw]

Each optimizer, in fp32 and in bf16 with fp32 masters, is saved by each number of ranks at each stage, and loaded by
each number of ranks at each stage. What was loaded is compared with what was saved; what comes two steps later with
plain torch, which loads the same checkpoint and plays that number of ranks; and with the run that was not stopped,
where number and stage are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

import retrograde as rg
from retrograde.layout import Precision
from tests.checkpoint.runs import OPTIMIZERS, State, differences, everything, merged, new, train
from tests.harness import Pools, Ranks
from tests.meshes import mesh_of
from tests.multiproc.precise import computing
from tests.reference import play
from tests.small import backwards
from tests.stages import STAGES, WORLDS

BEFORE, AFTER = (0, 1), (2, 3)  # steps


class Kind(NamedTuple):
    """An optimizer, and how the model is sharded for it."""

    optimizer: str
    precision: str | None = None
    whole: str | None = None

    def options(self) -> dict[str, Any]:
        return {"precision": self.precision, "whole": self.whole}


KINDS = {
    **{name: Kind(name) for name in OPTIMIZERS},
    **{f"{name} in bf16": Kind(name, "bf16") for name in OPTIMIZERS},
    "muon by owners": Kind("muon", whole="matrices"),
    "muon by owners in bf16": Kind("muon", "bf16", "matrices"),
    "adafactor by owners": Kind("adafactor", whole="all"),
}


class SavedAt(NamedTuple):
    world: int
    stage: int


def save(rank: int, world: int, path: str, kind: Kind, stage: int) -> list[State]:
    """What was saved, and what it was two steps later."""
    model = new(3)
    rg.shard(model, stage, **kind.options())
    optimizers = OPTIMIZERS[kind.optimizer](model)
    train(model, optimizers, rank, *BEFORE)
    rg.save(path, model, optimizers)
    saved = everything(model, optimizers)
    train(model, optimizers, rank, *AFTER)
    return [saved, everything(model, optimizers)]


def load(rank: int, world: int, path: str, kind: Kind, stages: Sequence[int], replicas: int = 1) -> list[list[State]]:
    """The same at each stage, into a new run and into one that has stepped."""
    found = []
    for stage in stages:
        model = new(5)
        rg.shard(model, stage, mesh=mesh_of(replicas, world), **kind.options())
        optimizers = OPTIMIZERS[kind.optimizer](model)
        if stage > 1:
            train(model, optimizers, rank, 0)
        rg.load(path, model, optimizers)
        loaded = everything(model, optimizers)
        train(model, optimizers, rank, *AFTER)
        found.append([loaded, everything(model, optimizers)])
    dist.barrier()
    return found


def played(path: str, kind: Kind, world: int, stage: int) -> State:
    """Plain torch takes the same checkpoint and plays that world."""
    masters = new(7)
    optimizers = OPTIMIZERS[kind.optimizer](masters)
    rg.load(path, masters, optimizers)
    low = masters if kind.precision is None else computing(new(7), Precision.of(kind.precision))
    for step in AFTER:
        for name, param in low.named_parameters():
            param.data.copy_(masters.get_parameter(name).data)
        play(low, world, backwards(step), stage, masters=masters)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return everything(masters, optimizers)


def differ(kind: Kind, wanted: State, found: State) -> list[str]:
    """From plain torch. Adafactor takes norms of whole tensors: of those that are cut they are put together in double
    precision, which is another order of adding up."""
    rounded = kind.optimizer == "adafactor" and kind.whole is None
    return differences(wanted, found, tolerance=1e-4 if rounded else 0.0)


def faults(
    ranks: Ranks, path: str, kind: Kind, saved_at: SavedAt, worlds: Sequence[int], replicas: int = 1
) -> list[str]:
    """What differs, everywhere that one checkpoint is loaded."""
    saved, not_stopped = map(merged, zip(*ranks(saved_at.world).run(save, path, kind, saved_at.stage), strict=True))
    found = []
    for world in worlds:
        by_rank = ranks(world).run(load, path, kind, STAGES, replicas, timeout=120)
        for stage, states in zip(STAGES, zip(*by_rank, strict=True), strict=True):
            loaded, later = map(merged, zip(*states, strict=True))
            here = f"loaded by {world} ranks at stage {stage}"
            found += [f"{here}: {where}" for where in differences(saved, loaded)]
            if (world, stage) == saved_at:
                found += [f"{here}, not stopped: {where}" for where in differences(not_stopped, later)]
            if replicas == 1:
                wanted = merged([played(path, kind, world, stage)])
                found += [f"{here}, played: {where}" for where in differ(kind, wanted, later)]
    return found


def rows(kinds: Sequence[str]) -> Iterator[tuple[str, SavedAt]]:
    for kind, world, stage in itertools.product(kinds, WORLDS, STAGES):
        yield kind, SavedAt(world, stage)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    given = parser.parse_args(arguments)
    wrong = 0
    with contextlib.closing(Pools()) as ranks, tempfile.TemporaryDirectory() as folder:
        for number, (name, saved_at) in enumerate(rows(given.kinds)):
            found = faults(ranks, f"{folder}/{number}", KINDS[name], saved_at, WORLDS)
            wrong += len(found)
            loads = len(WORLDS) * len(STAGES)
            print(f"{name}, {saved_at.world} ranks, stage {saved_at.stage}: {loads} loads, {len(found)} faults")
            print("".join(f"    {each}\n" for each in found[:5]), end="", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
