"""The state of matrices that one rank holds whole: read at other worlds and stages, by owners and by everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import retrograde as rg
from tests.checkpoint.runs import State, differences, everything, merged, train
from tests.harness import Ranks
from tests.multiproc.matrices import MAKE, matrices_of, sharded, with_adamw
from tests.reference import play
from tests.small import backwards, build


def _saved(rank: int, world: int, path: str, kind: str, stage: int, whole: bool) -> State:
    model = build()
    engine = rg.shard(model, stage, whole=matrices_of(model) if whole else None)
    optimizers = with_adamw(MAKE[kind], model)
    train(model, optimizers, rank, 0, 1)
    rg.save(f"{path}/rg", model, optimizers)
    dcp.save(engine.state_dict(optimizers[0]), checkpoint_id=f"{path}/dcp")
    return everything(model, optimizers)


def _loaded(rank: int, world: int, path: str, kind: str, stage: int, whole: bool) -> list[State]:
    found = []
    model = build(5)
    engine = rg.shard(model, stage, whole=matrices_of(model) if whole else None)
    optimizers = with_adamw(MAKE[kind], model)
    rg.load(f"{path}/rg", model, optimizers)
    found.append(everything(model, optimizers))
    train(model, optimizers, rank, 2)
    found.append(everything(model, optimizers))
    state = engine.state_dict(optimizers[0])
    dcp.load(state, checkpoint_id=f"{path}/dcp")
    engine.load_state_dict(state, optimizer=optimizers[0])
    found.append(everything(model, optimizers[:1]))
    dist.barrier()
    return found


def _plainly(path: str, kind: str, world: int, stage: int) -> list[State]:
    """Plain torch takes the same checkpoint and plays that world."""
    model = build(7)
    optimizers = with_adamw(MAKE[kind], model)
    rg.load(f"{path}/rg", model, optimizers)
    found = [merged([everything(model, optimizers)])]
    play(model, world, backwards(2), stage)
    for optimizer in optimizers:
        optimizer.step()
    return [*found, merged([everything(model, optimizers)])]


@pytest.mark.parametrize("kind", ("muon", "shampoo"))
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 3, True), (4, 2, True)), ((4, 1, True), (2, 3, False)), ((2, 2, False), (4, 3, True))]
)
def test_checkpoints(ranks: Ranks, tmp_path: Path, kind: str, saved: Any, loaded: Any) -> None:
    """World, stage, and whether matrices are whole."""
    path = str(tmp_path)
    world, stage, whole = saved
    wanted = merged(ranks(world).run(_saved, path, kind, stage, whole))
    world, stage, whole = loaded
    at_once, later = _plainly(path, kind, world, stage)
    assert differences(wanted, at_once) == []
    found = [merged(states) for states in zip(*ranks(world).run(_loaded, path, kind, stage, whole), strict=True)]
    first = {"model": wanted["model"], "optimizers": wanted["optimizers"][:1]}
    assert differences([wanted, later, first], found) == []


def _own_files(rank: int, world: int, path: str) -> str:
    model = sharded(3)
    optimizer = torch.optim.Muon(matrices_of(model), lr=2**-4)
    train(model, [optimizer], rank, 0)
    torch.save(optimizer.state_dict(), f"{path}/{rank}")
    wanted = everything(model, [optimizer])
    train(model, [optimizer], rank, 1)
    optimizer.load_state_dict(torch.load(f"{path}/{rank}"))
    loaded = everything(model, [optimizer])
    assert differences(wanted["optimizers"], loaded["optimizers"]) == []
    dist.barrier()
    with pytest.raises(rg.StateError) as refused:
        optimizer.load_state_dict(torch.load(f"{path}/{1 - rank}"))
    dist.barrier()
    return str(refused.value)


def test_each_ranks_own_file(ranks: Ranks, tmp_path: Path) -> None:
    for rank, said in enumerate(ranks(2).run(_own_files, str(tmp_path))):
        assert f"was saved by rank {1 - rank} of 2, this is rank {rank} of 2" in said
