"""What is loaded is what was saved, bit for bit, at every world and stage; training goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from tests.checkpoint.loaded import KINDS, SavedAt, faults, load
from tests.checkpoint.runs import OPTIMIZERS, State, buffered, differences, everything, new, train
from tests.harness import Ranks
from tests.meshes import mesh_of
from tests.stages import OPPOSITE_STAGES, STAGES, WORLDS

# Each saved by another number of ranks, at another stage; `python -m tests.checkpoint.loaded` has the whole table.
SAVED_AT = {
    "adamw": SavedAt(1, 3),
    "sgd": SavedAt(4, 2),
    "muon": SavedAt(2, 1),
    "adafactor": SavedAt(2, 1),
    "adamw in bf16": SavedAt(4, 3),
    "muon by owners": SavedAt(4, 3),
    "muon by owners in bf16": SavedAt(2, 2),
}


@pytest.mark.parametrize("kind", SAVED_AT)
def test_at_every_stage(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """What one rank has saved by all numbers of ranks, the rest by two and by four."""
    saved_at = SAVED_AT[kind]
    worlds = WORLDS if saved_at.world == 1 else (2, 4)
    assert faults(ranks, str(tmp_path / "checkpoint"), KINDS[kind], saved_at, worlds) == []


def test_in_replicas(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    assert faults(ranks, path, KINDS["adamw"], SavedAt(2, 3), (4,), replicas=2) == []


def _saved_in_replicas(rank: int, world: int, path: str) -> State:
    model = new(3)
    rg.shard(model, 3, mesh=mesh_of(2, world))
    optimizers = OPTIMIZERS["adamw"](model)
    train(model, optimizers, rank, 0)
    rg.save(path, model, optimizers)
    return everything(model, optimizers)


def test_of_replicas(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks(4).run(_saved_in_replicas, path)[0]
    for by_stage in ranks(2).run(load, path, KINDS["adamw"], STAGES):
        assert all(differences(saved, loaded) == [] for loaded, _ in by_stage)


# ---- going on with schedules
def _goes_on(rank: int, world: int, folder: str, stage: int) -> list[str]:
    wrong = []
    for kind in OPTIMIZERS:
        path = f"{folder}/{kind}"
        found = [_run(rank, path, kind, stage, resumed) for resumed in (False, True)]
        wrong += [f"{kind}{where}" for where in differences(*found)]
    dist.barrier()
    return wrong


def _run(rank: int, path: str, kind: str, stage: int, resumed: bool) -> State:
    """The second half of a run that is saved in between, and goes on or is resumed by another."""
    model = new(5 if resumed else 3)
    rg.shard(model, stage)
    optimizers = OPTIMIZERS[kind](model)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
    extra = {str(number): scheduler for number, scheduler in enumerate(schedulers)}
    if resumed:
        rg.load(path, model, optimizers, extra=extra)
    else:
        train(model, optimizers, rank, 0, 1)
        for scheduler in schedulers:
            scheduler.step()
        rg.save(path, model, optimizers, extra=extra)
    for step in (2, 3):
        train(model, optimizers, rank, step)
        for scheduler in schedulers:
            scheduler.step()
    return {**everything(model, optimizers), "drawn": torch.rand(3)}


@OPPOSITE_STAGES
def test_going_on_is_not_having_stopped(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    assert ranks(2).run(_goes_on, str(tmp_path), stage) == [[], []]


# ---- all that a model has
def _model_with_everything(rank: int, world: int, path: str) -> list[str]:
    model, other = buffered(3), buffered(5)
    wanted = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    rg.shard(model, 3)
    rg.shard(other, 2)
    rg.save(path, model)
    loaded = rg.load(path, other)
    state = {name: value for name, value in other.state_dict().items() if isinstance(value, torch.Tensor)}
    assert other.note == "seed 3"
    assert "cache" not in loaded.weights
    dist.barrier()
    return differences(wanted, whole_of(state))


def whole_of(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def test_frozen_parameters_buffers_and_other_state(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_model_with_everything, str(tmp_path / "checkpoint")) == [[], []]


def _generators(rank: int, world: int, path: str) -> None:
    import random

    import numpy

    model = new(3)
    rg.shard(model, 3)
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    rg.save(path, model)
    drawn = (torch.rand(3).tolist(), random.random(), numpy.random.rand())
    rg.load(path, model)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == drawn
    dist.barrier()


def test_random_generators_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_generators, str(tmp_path / "checkpoint"))
