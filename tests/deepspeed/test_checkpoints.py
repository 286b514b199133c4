"""DeepSpeed's checkpoints: training goes on from one as if it had not stopped; what is in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
import retrograde.deepspeed as deepspeed
from retrograde.integrations.deepspeed.checkpoints import LATEST
from tests.deepspeed.pair import build_with_loss, config
from tests.harness import Ranks
from tests.small import batch
from tests.stages import OPPOSITE_STAGES

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 2**-3, "warmup_num_steps": 8, "warmup_type": "linear"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def _engine(stage: int, seed: int, **more: Any) -> Any:
    adam = {"type": "AdamW", "params": {"lr": 2**-3}}
    asked = config(stage, 2, scheduler=SCHEDULE, optimizer=adam, zero_optimization=OFFLOAD, **more)
    return deepspeed.initialize(model=build_with_loss(seed), config=asked)[0]


def _train(engine: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(rank, step)))
        engine.step()


def _counted(engine: Any) -> tuple[int, ...]:
    return (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)


def _goes_on(rank: int, world: int, stage: int, folder: str, more: dict[str, Any]) -> dict[str, Any]:
    whole, first, second = (_engine(stage, seed, **more) for seed in (3, 3, 4))
    _train(whole, rank, 0, 8)
    _train(first, rank, 0, 4)
    first.save_checkpoint(folder, client_state={"epoch": 7})
    first.save_checkpoint(folder, tag="other", save_latest=False)
    where, state = second.load_checkpoint(folder)
    shown = (first.lr_scheduler.get_last_lr(), second.lr_scheduler.get_last_lr())
    _train(second, rank, 4, 8)
    theirs = whole.module.state_dict()
    wrong = [name for name, value in second.module.state_dict().items() if not torch.equal(value, theirs[name])]
    dist.barrier()
    return {
        "where": where,
        "state": dict(state),
        "wrong": wrong,
        "same": _counted(whole) == _counted(second) and whole.get_lr() == second.get_lr(),
        "shown": shown,
        "scale": (whole.loss_scale, second.loss_scale),
    }


@OPPOSITE_STAGES
@pytest.mark.parametrize("more", ({}, {"fp16": {"enabled": True, "initial_scale_power": 4}}), ids=("fp32", "fp16"))
def test_training_goes_on(ranks: Ranks, tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    """Also with offload in the config, which moves nothing on the CPU."""
    for said in ranks(2).run(_goes_on, stage, str(tmp_path), more):
        assert said["where"] == str(tmp_path / "global_step2") and said["state"] == {"epoch": 7}
        assert said["wrong"] == [] and said["same"]
        assert said["shown"][0] == said["shown"][1] != [0.0]
        assert said["scale"][0] == said["scale"][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest", "other"]


def _parts(rank: int, world: int, folder: str) -> dict[str, Any]:
    engine = _engine(3, 3)
    _train(engine, rank, 0, 2)
    engine.save_checkpoint(folder, "saved")
    only = _engine(3, 4)
    only.load_checkpoint(folder, load_module_only=True)
    dist.barrier()
    return {"nothing": _engine(3, 4).load_checkpoint(f"{folder}/elsewhere"), "counted": _counted(only)}


def test_the_model_alone_and_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(_parts, str(tmp_path)):
        assert said == {"nothing": (None, {}), "counted": (0, 0, 0, 0)}


def _refused(rank: int, world: int, folder: str) -> list[str]:
    engine = _engine(3, 3)
    said = []
    for call in (
        lambda: engine.save_checkpoint(folder, "a/b"),
        lambda: engine.save_checkpoint(folder, exclude_frozen_parameters=True),
        lambda: engine.load_checkpoint(folder, custom_load_fn=print),
        lambda: engine.load_checkpoint(folder, "absent"),
        lambda: engine.save_16bit_model(folder, exclude_frozen_parameters=True),
    ):
        with pytest.raises(rg.RetrogradeError) as error:
            call()
        said.append(str(error.value))
    dist.barrier()
    return said


def test_what_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(_refused, str(tmp_path)):
        assert said[0] == "tag='a/b' is not the name of a folder; give a name, such as 'global_step100'"
        assert said[1] == "exclude_frozen_parameters=True is not there; give False, or leave it out" == said[4]
        assert said[2].startswith("custom_load_fn=<built-in function print> is not there")
        assert "absent" in said[3] and "is not there" in said[3]


def _one_file(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    engine = _engine(3, 3, bf16={"enabled": True})
    engine.save_16bit_model(folder)
    engine.save_16bit_model(folder, "model.safetensors")
    state = {name: value.to(torch.bfloat16) for name, value in engine.module.state_dict().items()}
    dist.barrier()
    return state


def test_weights_in_one_file(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    want, _ = ranks(2).run(_one_file, str(tmp_path))
    for found in (torch.load(tmp_path / "pytorch_model.bin"), load_file(tmp_path / "model.safetensors")):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) and value.dtype is torch.bfloat16 for name, value in want.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def _tied(rank: int, world: int, folder: str) -> torch.Tensor:
    engine = deepspeed.initialize(model=TiedHead(), config=config(3))[0]
    engine.save_16bit_model(folder)
    weight = rg.full_tensor(engine.module.embed.weight).clone()
    dist.barrier()
    return weight


def test_tied_weights_in_one_file(ranks: Ranks, tmp_path: Path) -> None:
    """Under all their names, as `load_state_dict` wants them."""
    weight, _ = ranks(2).run(_tied, str(tmp_path))
    found = TiedHead()
    found.load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    assert torch.equal(found.head.weight, weight)


def _first_rank_fails(rank: int, world: int, folder: str) -> list[str]:
    engine = _engine(3, 3)
    said = []
    for call in (
        lambda: engine.save_checkpoint(folder),
        lambda: engine.save_16bit_model(folder, "taken"),
        lambda: engine.load_checkpoint(f"{folder}/{'hostile' if rank == 0 else 'nowhere'}"),
    ):
        with pytest.raises((rg.RetrogradeError, OSError, RuntimeError)) as error:
            call()
        said.append(str(error.value))
    dist.barrier()
    return said


def test_what_the_first_rank_cannot_do(ranks: Ranks, tmp_path: Path) -> None:
    """Nobody waits for it; and a tag in a file is a name, as one that is given."""
    for name in (LATEST, "taken", "hostile"):
        (tmp_path / name).mkdir()
    (tmp_path / "hostile" / LATEST).write_text("../elsewhere")
    own, told = ranks(2).run(_first_rank_fails, str(tmp_path), timeout=30)
    assert told[0].startswith(f"save_checkpoint() failed on rank 0: IsADirectoryError: {own[0][:9]}")
    assert told[1] == f"save_16bit_model({str(tmp_path / 'taken')!r}) failed on rank 0: RuntimeError: {own[1]}"
    assert own[2] == told[2] == "tag='../elsewhere' is not the name of a folder; give a name, such as 'global_step100'"


def _one_rank_looks_elsewhere(rank: int, world: int, folder: str) -> tuple[str, str]:
    engine = _engine(3, 3)
    engine.save_checkpoint(folder)
    with pytest.raises(rg.CheckpointError) as error:
        engine.load_checkpoint(folder if rank == 0 else f"{folder}/elsewhere")
    nothing = engine.load_checkpoint(f"{folder}/elsewhere" if rank == 0 else folder)
    dist.barrier()
    return str(error.value), str(nothing[0])


def test_a_rank_that_sees_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """All load what the first rank finds, or nothing: none goes on without it while the others wait."""
    first, second = ranks(2).run(_one_rank_looks_elsewhere, str(tmp_path), timeout=30)
    assert first == (f"rg.load() failed on rank 1: {second[0]}", "None")
    assert "elsewhere/global_step0" in second[0] and second[1] == "None"
