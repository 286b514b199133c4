"""Others: torch.distributed.checkpoint itself, FSDP2, plain models, pipelines. All read what the others have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import retrograde as rg
from tests.checkpoint.runs import OPTIMIZERS, State, differences, everything, new, train, whole
from tests.harness import Ranks
from tests.small import VOCAB, Small


def _sharded(seed: int, stage: int = 3) -> tuple[rg.Engine, nn.Module, list[torch.optim.Optimizer]]:
    model = new(seed)
    engine = rg.shard(model, stage)
    return engine, model, OPTIMIZERS["adamw"](model)


def _fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = new(seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, OPTIMIZERS["adamw"](model)[0]


# ---- torch's own functions
def _by_dcp(rank: int, world: int, folder: str) -> list[str]:
    """`dcp.save(engine.state_dict(optimizer))` and rg.save read each other."""
    engine, model, optimizers = _sharded(3)
    train(model, optimizers, rank, 0)
    wanted = everything(model, optimizers)
    dcp.save(engine.state_dict(optimizers[0]), checkpoint_id=f"{folder}/theirs")
    rg.save(f"{folder}/ours", model, optimizers)
    wrong = []
    _, other, others = _sharded(5, 2)
    assert rg.load(f"{folder}/theirs", other, others).origin == "torch.distributed.checkpoint"
    wrong += differences(wanted, everything(other, others), "theirs")
    engine, other, others = _sharded(7, 1)
    train(other, others, rank, 0)
    state = engine.state_dict(others[0])
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    engine.load_state_dict(state, optimizer=others[0])
    wrong += differences(wanted, everything(other, others), "ours")
    numbered = {"model": engine.state_dict(), "optimizer": others[0].state_dict()}
    dcp.save(numbered, checkpoint_id=f"{folder}/numbered")
    _, other, others = _sharded(9, 3)
    rg.load(f"{folder}/numbered", other, others)
    wrong += differences(wanted, everything(other, others), "numbered")
    dist.barrier()
    return wrong


def test_by_torch_itself(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_by_dcp, str(tmp_path)) == [[], []]


# ---- FSDP2
def _saved_by_fsdp(rank: int, world: int, folder: str) -> State:
    model, optimizer = _fsdp(3)
    train(model, [optimizer], rank, 0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save({"app": state}, checkpoint_id=f"{folder}/app")
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
    dcp.save(state, checkpoint_id=f"{folder}/flat")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/weights")
    return {"model": whole(dict(model.state_dict())), "optimizers": [whole(optimizer.state_dict())]}


def _fsdp_is_read(rank: int, world: int, folder: str) -> list[State]:
    found = []
    for name in ("app", "flat"):
        _, model, optimizers = _sharded(5)
        rg.load(f"{folder}/{name}", model, optimizers)
        found.append(everything(model, optimizers))
    _, model, _ = _sharded(7)
    rg.load(f"{folder}/weights", model)
    found.append({"model": dict(model.state_dict()), "optimizers": found[0]["optimizers"]})
    dist.barrier()
    return found


def test_that_of_fsdp2_is_read(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(4).run(_saved_by_fsdp, str(tmp_path))[0]
    for found in ranks(2).run(_fsdp_is_read, str(tmp_path)):
        for loaded in found:
            assert differences(saved, loaded) == []


def _saved(rank: int, world: int, path: str) -> State:
    _, model, optimizers = _sharded(3)
    train(model, optimizers, rank, 0)
    rg.save(path, model, optimizers, extra={"step": 1})
    return everything(model, optimizers)


def _read_by_fsdp(rank: int, world: int, path: str) -> State:
    """As torch's documentation has it."""
    model, optimizer = _fsdp(5)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "extra": {"step": 0},
    }
    dcp.load(state, checkpoint_id=path)
    assert state["extra"]["step"] == 1
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return {"model": whole(dict(model.state_dict())), "optimizers": [whole(optimizer.state_dict())]}


def test_fsdp2_reads_ours(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks(2).run(_saved, path)[0]
    for loaded in ranks(4).run(_read_by_fsdp, path):
        assert differences(saved, loaded) == []


# ---- pipelines
class Whole(Small):
    """The small model as a chain of blocks with the same names."""

    def chain(self) -> nn.Sequential:
        parts = nn.Sequential()
        parts.add_module("embed", self.embed)
        blocks = nn.Sequential()
        for number, block in enumerate(self.blocks):
            blocks.add_module(str(number), block)
        parts.add_module("blocks", blocks)
        parts.add_module("head", self.head)
        return parts


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


ZEROS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "pages": {"stage": 3},
    "masters": {"stage": 2, "precision": "bf16"},
}


def _pipeline(seed: int, zero: str) -> tuple[rg.Pipeline, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    options = ZEROS[zero]
    how = None if options is None else rg.Zero(mesh=mesh["dp"], **options)
    pipe = rg.Pipeline(Whole().chain(), schedule="1f1b", microbatches=2, loss=_loss, mesh=mesh["pp"], zero=how)
    parameters = list(pipe.parameters())
    flat = [param for param in parameters if param.ndim < 2]
    rest = [param for param in parameters if param.ndim > 1]
    return pipe, torch.optim.AdamW([{"params": rest}, {"params": flat, "weight_decay": 0.0}], lr=2**-4)


def _step(pipe: rg.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
    pipe.step(ids, target=ids.roll(-1, 1))
    optimizer.step()
    optimizer.zero_grad()


def _of_pipeline(pipe: rg.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name: weights and states of this rank's stages."""
    found = {}
    for name, param in pipe.named_parameters():
        state = {key: whole(value) for key, value in optimizer.state.get(param, {}).items()}
        found[name] = {"weight": whole(param), **state}
    return found


def _saved_by_pipeline(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for zero in ZEROS:
        pipe, optimizer = _pipeline(3, zero)
        _step(pipe, optimizer)
        rg.save(f"{folder}/{zero}", pipe, optimizer)
        found[zero] = _of_pipeline(pipe, optimizer)
        rg.export(f"{folder}/{zero}-weights", pipe, file_size=2000)
    dist.barrier()
    return found


def _read_by_whole(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for zero in ZEROS:
        _, model, (optimizer,) = _sharded(5)
        rg.load(f"{folder}/{zero}", model, optimizer)
        named = model.named_parameters()
        found[zero] = {
            name: {"weight": whole(param), **{key: whole(value) for key, value in optimizer.state[param].items()}}
            for name, param in named
        }
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        plain = new(7)
        rg.load_pretrained(plain, f"{folder}/{zero}-weights")
        assert all(torch.equal(param, found[zero][name]["weight"]) for name, param in plain.named_parameters())
    dist.barrier()
    return found


def test_a_whole_model_reads_that_of_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(4).run(_saved_by_pipeline, str(tmp_path))
    for found in ranks(2).run(_read_by_whole, str(tmp_path)):
        for zero, loaded in found.items():
            saved = {name: value for rank in by_rank for name, value in rank[zero].items()}
            assert differences(saved, {name: loaded[name] for name in saved}) == []
            assert loaded.keys() == saved.keys()


def _read_by_pipeline(rank: int, world: int, path: str) -> list[dict[str, Any]]:
    found = []
    for zero in ZEROS:
        pipe, optimizer = _pipeline(5, zero)
        rg.load(path, pipe, optimizer)
        found.append(_of_pipeline(pipe, optimizer))
        _step(pipe, optimizer)
    dist.barrier()
    return found


def test_a_pipeline_reads_that_of_a_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks(2).run(_saved, path)[0]
    names = [name for name, _ in new(3).named_parameters()]
    model = new(3)
    flat = [name for name, param in model.named_parameters() if param.ndim < 2]
    order = [name for name in names if name not in flat] + flat
    for found in ranks(4).run(_read_by_pipeline, path):
        for loaded in found:
            for name, values in loaded.items():
                state = saved["optimizers"][0]["state"][order.index(name)]
                assert differences({"weight": saved["model"][name], **state}, values, name) == []
