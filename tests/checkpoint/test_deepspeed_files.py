"""Checkpoints of DeepSpeed are read, and nothing in them is executed. The files are made here as DeepSpeed does."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
import retrograde.deepspeed as deepspeed
from tests.checkpoint.runs import OPTIMIZERS, State, differences, everything, new, train
from tests.harness import Ranks

RANKS = 3
KEYS = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Tensor]]


# ---- classes that are in such files
@dataclass
class fragment_address:  # noqa: N801 - DeepSpeed's name
    numel: int
    start: int


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class ZeroStageEnum(IntEnum):
    gradients = 2
    weights = 3


@contextlib.contextmanager
def as_deepspeed() -> Iterator[None]:
    """While files are written, these classes have the names of DeepSpeed's. Nobody has it when they are read."""
    homes = {
        "deepspeed.utils.tensor_fragment": fragment_address,
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
        "deepspeed.runtime.zero.config": ZeroStageEnum,
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, cls in homes.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                patched.setitem(sys.modules, path, sys.modules.get(path) or types.ModuleType(path))
            setattr(sys.modules[name], cls.__name__, cls)
            patched.setattr(cls, "__module__", name)
        yield


# ---- a run, and its files
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = new(3)
    model.register_buffer("count", torch.arange(3.0))
    (optimizer,) = OPTIMIZERS["adamw"](model)
    train(model, [optimizer], 0, 0, 1)
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Groups]:
    """Weights and states, by group and name."""
    names = {param: name for name, param in model.named_parameters()}
    found: dict[str, Groups] = {"weights": [], **{key: [] for key in KEYS}}
    for group in optimizer.param_groups:
        found["weights"].append({names[param]: param.detach() for param in group["params"]})
        for key in KEYS:
            found[key].append({names[param]: optimizer.state[param][key] for param in group["params"]})
    return found


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{**group, "params": [number]} for number, group in enumerate(groups)]


def model_file(model: nn.Module, groups: Groups, stage: int) -> dict[str, Any]:
    weights = model.state_dict()
    module = {name: value if name == "count" or stage < 3 else torch.empty(0) for name, value in weights.items()}
    shapes = [{name: tensor.shape for name, tensor in group.items()} for group in groups]
    schedule = {"last_batch_iteration": 1}
    return {
        "module": module,
        "param_shapes": shapes,
        "global_steps": 2,
        "buffer_names": ["count"],
        "lr_scheduler": schedule,
    }


def write_stage_2(folder: Path) -> None:
    """Each group one after the other, padded, cut into equal parts."""
    model, optimizer = trained()
    tensors = tensors_of(model, optimizer)
    torch.save(model_file(model, tensors["weights"], 2), folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        flats: dict[str, list[Tensor]] = {key: [] for key in tensors}
        addresses: list[dict[str, fragment_address]] = []
        for key, groups in tensors.items():
            for group in groups:
                flat = torch.cat([tensor.reshape(-1) for tensor in group.values()])
                flat = torch.cat([flat, flat.new_zeros(-flat.numel() % (2 * RANKS))])
                flats[key].append(flat.chunk(RANKS)[rank].clone())
                if key == "weights":
                    addresses.append(_addresses(group, rank, flat.numel() // RANKS))
        state = {
            number: {"step": torch.tensor(2.0), **{key: flats[key][number] for key in KEYS}} for number in range(2)
        }
        own = {
            "loss_scaler": LossScaler(),
            "zero_stage": ZeroStageEnum.gradients,
            "single_partition_of_fp32_groups": flats["weights"],
            "base_optimizer_state": {"state": state, "param_groups": options_of(optimizer)},
            "param_slice_mappings": addresses,
        }
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": own, "ds_version": "0.19.8"}, file)


def _addresses(group: dict[str, Tensor], rank: int, length: int) -> dict[str, fragment_address]:
    found, at = {}, 0
    for name, tensor in group.items():
        start, stop = max(at, rank * length), min(at + tensor.numel(), (rank + 1) * length)
        if start < stop:
            found[name] = fragment_address(stop - start, start - rank * length)
        at += tensor.numel()
    return found


def write_stage_3(folder: Path) -> None:
    """Each parameter in equal shares."""
    model, optimizer = trained()
    tensors = tensors_of(model, optimizer)
    for rank in range(RANKS):
        flats = {
            key: [torch.cat([_share(tensor, rank) for tensor in group.values()]) for group in groups]
            for key, groups in tensors.items()
        }
        state = {
            number: {"step": torch.tensor(2.0), **{key: flats[key][number] for key in KEYS}} for number in range(2)
        }
        own = {
            "zero_stage": ZeroStageEnum.weights,
            "fp32_flat_groups": flats["weights"],
            "optimizer_state_dict": {"state": state, "param_groups": options_of(optimizer)},
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": own}, folder / f"{name}_optim_states.pt")
        torch.save(model_file(model, tensors["weights"], 3), folder / f"{name}_model_states.pt")


def _share(tensor: Tensor, rank: int) -> Tensor:
    length = -(-tensor.numel() // RANKS)
    flat = tensor.reshape(-1)
    return torch.cat([flat, flat.new_zeros(length * RANKS - flat.numel())])[rank * length : (rank + 1) * length].clone()


def write_universal(folder: Path) -> None:
    model, optimizer = trained()
    tensors = tensors_of(model, optimizer)
    torch.save(model_file(model, tensors["weights"], 2), folder / "mp_rank_00_model_states.pt")
    for key, groups in tensors.items():
        for name, tensor in (item for group in groups for item in group.items()):
            own = folder / "zero" / name
            own.mkdir(parents=True, exist_ok=True)
            torch.save({"cat_dim": 0, "param": tensor.clone()}, own / f"{key.replace('weights', 'fp32')}.pt")
            torch.save(torch.tensor(2.0), own / "step.pt")
    torch.save({"loss_scaler": LossScaler(), "param_groups": options_of(optimizer)}, folder / "zero/optimizer_state.pt")


WRITERS = {"stage 2": write_stage_2, "stage 3": write_stage_3, "universal": write_universal}


@pytest.fixture(params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """As `engine.save_checkpoint` leaves it: a file says which is the latest."""
    (tmp_path / "global_step2").mkdir()
    (tmp_path / "latest").write_text("global_step2")
    with as_deepspeed():
        WRITERS[request.param](tmp_path / "global_step2")
    return tmp_path


# ---- reading them
def test_a_plain_model_reads_them(folder: Path) -> None:
    model, optimizer = trained()
    other = new(5)
    other.register_buffer("count", torch.zeros(3))
    others = OPTIMIZERS["adamw"](other)
    loaded = rg.load(folder, other, others)
    assert differences(everything(model, [optimizer]), everything(other, others)) == []
    assert loaded.origin.startswith("DeepSpeed")
    assert "exp_avg, exp_avg_sq, step of 27 parameters" in str(loaded)
    assert "global_steps of the file of the model" in loaded.notes


def _sharded_reads(rank: int, world: int, path: str) -> State:
    model = new(5)
    model.register_buffer("count", torch.zeros(3))
    rg.shard(model, 3)
    optimizers = OPTIMIZERS["adamw"](model)
    rg.load(path, model, optimizers)
    found = everything(model, optimizers)
    dist.barrier()
    return found


def test_a_sharded_model_reads_them(ranks: Ranks, folder: Path) -> None:
    model, optimizer = trained()
    for loaded in ranks(2).run(_sharded_reads, str(folder)):
        assert differences(everything(model, [optimizer]), loaded) == []


def _goes_on(rank: int, world: int, path: str) -> tuple[list[float], list[float]]:
    model = new(5)
    model.register_buffer("count", torch.zeros(3))
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}}
    asked = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "scheduler": schedule}
    engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=OPTIMIZERS["adamw"](model)[0], config=asked)
    engine.load_checkpoint(path)
    loaded = scheduler.get_last_lr()
    scheduler.step()
    return loaded, scheduler.get_last_lr()


def test_the_schedule_of_such_a_run_goes_on(ranks: Ranks, folder: Path) -> None:
    assert ranks(2).run(_goes_on, str(folder)) == [([0.125, 0.125], [0.25, 0.25])] * 2


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with as_deepspeed():
        write_stage_3(tmp_path)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(rg.CheckpointError, match="no file of rank 1"):
        rg.load(tmp_path, new(5))
    (tmp_path / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    model = new(5)
    model.register_buffer("count", torch.zeros(3))
    with pytest.raises(rg.CheckpointError, match="is one of them missing"):
        rg.load(tmp_path, model)


class Evil:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.victim}",)


def test_nothing_is_executed(tmp_path: Path) -> None:
    with as_deepspeed():
        write_stage_2(tmp_path)
    victim = tmp_path / "victim"
    torch.save({"optimizer_state_dict": Evil(victim)}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(rg.CheckpointError, match=r"nothing of it was executed: it names posix\.system"):
        rg.load(tmp_path, new(5))
    assert not victim.exists()
