"""DeepSpeed's checkpoints: training goes on from one as if it had not stopped; what is in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
import retrograde.deepspeed as deepspeed
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
    _train(second, rank, 4, 8)
    theirs = whole.module.state_dict()
    wrong = [name for name, value in second.module.state_dict().items() if not torch.equal(value, theirs[name])]
    dist.barrier()
    return {
        "where": where,
        "state": dict(state),
        "wrong": wrong,
        "same": _counted(whole) == _counted(second) and whole.get_lr() == second.get_lr(),
        "scale": (whole.loss_scale, second.loss_scale),
    }


@OPPOSITE_STAGES
@pytest.mark.parametrize("more", ({}, {"fp16": {"enabled": True, "initial_scale_power": 4}}), ids=("fp32", "fp16"))
def test_training_goes_on(ranks: Ranks, tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    """Also with offload in the config, which moves nothing on the CPU."""
    for said in ranks(2).run(_goes_on, stage, str(tmp_path), more):
        assert said["where"] == str(tmp_path / "global_step2") and said["state"] == {"epoch": 7}
        assert said["wrong"] == [] and said["same"]
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
