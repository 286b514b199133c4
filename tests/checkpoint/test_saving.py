"""Saving: folders that are there when all of it is, what is kept, what goes with the model, and going on meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.checkpoint import folders
from tests.checkpoint.runs import OPTIMIZERS, differences, everything, new, train
from tests.harness import Ranks


def linear(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def value_at(path: Path) -> float:
    model = linear(-1.0)
    rg.load(path, model)
    assert bool((model.weight == model.weight[0, 0]).all())
    return model.weight[0, 0].item()


# ---- folders
def test_a_folder_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint"
    assert rg.save(path, linear(1.0)).wait() == path
    assert sorted(each.name for each in path.iterdir()) == [".metadata", "__0_0.distcp", "retrograde.json"]
    rg.save(path, linear(2.0))
    assert value_at(path) == 2.0
    assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]


def _complete(path: Path, value: float) -> None:
    rg.save(path, linear(value))


def test_every_state_that_a_crash_can_leave(tmp_path: Path) -> None:
    """The renames of folders.py, interrupted after each."""
    path, saving, previous = (tmp_path / name for name in ("a", ".a.saving", ".a.previous"))
    _complete(tmp_path / "old", 1.0)
    _complete(tmp_path / "new", 2.0)

    def leave(**names: Path | None) -> None:
        for place, source in (
            (path, names.get("here")),
            (saving, names.get("written")),
            (previous, names.get("before")),
        ):
            shutil.rmtree(place, ignore_errors=True)
            if source is not None:
                shutil.copytree(source, place)

    old, new_ = tmp_path / "old", tmp_path / "new"
    partial = tmp_path / "partial"
    shutil.copytree(new_, partial)
    (partial / "retrograde.json").unlink()
    for written, before, here, expected in (
        (partial, None, old, 1.0),
        (new_, None, old, 1.0),
        (new_, old, None, 2.0),
        (partial, old, None, 1.0),
        (None, old, new_, 2.0),
        (new_, None, None, 2.0),
    ):
        leave(written=written, before=before, here=here)
        assert value_at(path) == expected
        leave(written=written, before=before, here=here)
        folders.prepare(path)  # the next save begins, and is interrupted at once
        assert value_at(path) == expected
        rg.save(path, linear(3.0))
        assert value_at(path) == 3.0
        assert not saving.exists()
        assert not previous.exists()


def test_a_crash_at_every_step_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever touches the disk raises, the first time, then the second, and so on."""

    class Crash(BaseException):
        pass

    path = tmp_path / "a"
    rg.save(path, linear(0.0))
    calls = (os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (shutil, "rmtree")
    originals = {(owner, name): getattr(owner, name) for owner, name in calls}
    crashes = 0
    for number in range(1, 100):
        left = [number]

        def crashing(original: Any, left: list[int] = left) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    raise Crash
                return original(*args, **kwargs)

            return call

        with monkeypatch.context() as patched:
            for (owner, name), original in originals.items():
                patched.setattr(owner, name, crashing(original))
            try:
                rg.save(path, linear(float(number)))
            except (Crash, rg.CheckpointError):
                crashes += 1
        if left[0] > 0:
            break
        assert folders.is_complete(folders.find(path))  # with its checksums
        assert value_at(path) in (float(number - 1), float(number))
        rg.save(path, linear(float(number)))
    assert crashes >= 6
    assert value_at(path) == float(number)


def test_a_marker_is_there_when_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between opening and writing it must not leave what looks complete."""
    original = Path.open
    opened = []

    def watched(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = original(path, mode, *args, **kwargs)
        if "b" in mode and "r" not in mode:
            opened.append(path.name)
            assert not folders.is_complete(path.parent)
        return file

    monkeypatch.setattr(Path, "open", watched)
    rg.save(tmp_path / "a", linear(1.0))
    assert len(opened) == 1


def test_what_is_there_is_not_destroyed(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").touch()
    with pytest.raises(rg.CheckpointError, match="is there and is not a checkpoint"):
        rg.save(tmp_path / "papers", linear(1.0))
    assert (tmp_path / "papers" / "thesis").exists()


def test_keep(tmp_path: Path) -> None:
    (tmp_path / "run-7").mkdir()  # not a checkpoint
    rg.save(tmp_path / "other-1", linear(0.0))
    for step in (1, 2, 10, 3):
        rg.save(tmp_path / f"run-{step}", linear(float(step)), keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other-1", "run-10", "run-3", "run-7"]
    assert value_at(tmp_path) == 3.0  # the last that was saved, in a folder of several
    with pytest.raises(rg.CheckpointError, match="keep: 'run' has no number"):
        rg.save(tmp_path / "run", linear(1.0), keep=2)
    with pytest.raises(rg.CheckpointError, match="keep=0 is too small"):
        rg.save(tmp_path / "run-4", linear(1.0), keep=0)


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes, as they are written and read; not where nobody looks."""
    rg.save(tmp_path / "a", linear(1.0))
    rg.load(tmp_path / "a", linear(2.0))
    assert capsys.readouterr().err == ""
    rg.save(tmp_path / "a", linear(1.0), progress=True)
    assert "saving a" in capsys.readouterr().err
    rg.load(tmp_path / "a", linear(2.0), progress=True)
    assert "loading a" in capsys.readouterr().err


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(rg.CheckpointError, match="is not there"):
        rg.load(tmp_path / "a", linear(1.0))
    with pytest.raises(rg.CheckpointError, match="has no checkpoint in it"):
        rg.load(tmp_path, linear(1.0))


# ---- what goes with the model
def _extra(rank: int, world: int, path: str) -> None:
    model = new(3)
    rg.shard(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scheduler.step()
    rg.save(
        path,
        model,
        optimizer,
        extra={"step": 7, "loader": {"at": 10 * rank, "order": torch.arange(rank + 1)}, "lr": scheduler, "amp": scaler},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    again = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu")
    loaded = rg.load(path, model, optimizer, extra={"lr": again, "amp": scaler})
    assert again.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert scaler.state_dict()["scale"] == 8.0
    assert loaded.extra["step"] == 7
    assert loaded.extra["loader"]["at"] == 10 * rank
    assert torch.equal(loaded.extra["loader"]["order"], torch.arange(rank + 1))
    assert [each["loader"]["at"] for each in loaded.extra_by_rank] == [0, 10]
    dist.barrier()


def test_extra(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    ranks(2).run(_extra, str(path))
    model = new(5)
    loaded = rg.load(path, model)  # one process, which is none of the two
    assert loaded.extra["step"] == 7
    assert "loader" not in loaded.extra
    assert [each["loader"]["at"] for each in loaded.extra_by_rank] == [0, 10]
    assert "random generators: saved by 2 ranks, here are 1" in loaded.notes
    with pytest.raises(
        rg.CheckpointError, match=r"extra\['loader'\] was saved by 2 ranks, each its own, and here are 1"
    ):
        rg.load(path, model, extra={"loader": nn.Linear(1, 1)})
    with pytest.raises(rg.CheckpointError, match=r"extra\['other'\] was not saved"):
        rg.load(path, model, extra={"other": nn.Linear(1, 1)})
    with pytest.raises(rg.CheckpointError, match=r"extra\['step'\] has no load_state_dict"):
        rg.load(path, model, extra={"step": 3})


def test_extra_that_could_not_be_read(tmp_path: Path) -> None:
    for value in (Path("/"), lambda: None, object()):
        with pytest.raises(rg.CheckpointError, match=r"extra\['it'\]=.* could not be read back"):
            rg.save(tmp_path / "a", linear(1.0), extra={"it": value})
    assert not (tmp_path / "a").exists()


# ---- mistakes
def test_mistakes(tmp_path: Path) -> None:
    model, other = linear(1.0), linear(2.0)
    optimizer = torch.optim.SGD(other.parameters())
    with pytest.raises(rg.CheckpointError, match=r"has a parameter of shape .* that is not in the model"):
        rg.save(tmp_path / "a", model, optimizer)
    twice = [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())]
    with pytest.raises(rg.CheckpointError, match="parameter bias is in two of them"):
        rg.save(tmp_path / "a", model, twice)
    for wrong in ("adam", 3):
        with pytest.raises(rg.CheckpointError, match="is not an optimizer; give an optimizer, a list of them, or None"):
            rg.save(tmp_path / "a", model, wrong)
    with pytest.raises(rg.CheckpointError, match="model=3 is not a model"):
        rg.save(tmp_path / "a", 3)
    with pytest.raises(rg.CheckpointError, match="path=3 is not a path"):
        rg.save(3, model)
    rg.save(tmp_path / "a", model)
    with pytest.raises(rg.CheckpointError, match="has no optimizer's state"):
        rg.load(tmp_path / "a", other, optimizer)
    with pytest.raises(rg.CheckpointError, match=r"it has no 0\.weight, 0\.bias; this model has no weight, bias"):
        rg.load(tmp_path / "a", nn.Sequential(other))
    loaded = rg.load(tmp_path / "a", nn.Sequential(other), strict=False)
    assert loaded.weights == ()
    assert "0.weight: the checkpoint has none" in loaded.notes


def test_groups_that_were_otherwise(tmp_path: Path) -> None:
    model = linear(1.0)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    rg.save(tmp_path / "a", model, torch.optim.SGD(groups))
    with pytest.raises(rg.CheckpointError, match="weight and bias are in one group here"):
        rg.load(tmp_path / "a", model, torch.optim.SGD(model.parameters()))
    turned = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}])
    rg.load(tmp_path / "a", model, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.25, 0.5]


def _one_rank_fails(rank: int, world: int, path: str) -> str:
    model = new(3)
    rg.shard(model, 3)
    with pytest.raises(rg.CheckpointError) as caught:
        rg.save(path, model, extra={"it": object() if rank == 1 else 3})
    dist.barrier()
    return str(caught.value)


def test_a_mistake_on_one_rank_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(_one_rank_fails, str(tmp_path / "a"))
    assert first.startswith("rg.save() failed on rank 1: extra['it']=")
    assert second.startswith("extra['it']=")


# ---- in the background
def _meanwhile(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    for kind in ("adamw", "muon"):
        model = new(3)
        rg.shard(model, 3)
        optimizers = OPTIMIZERS[kind](model)
        train(model, optimizers, rank, 0)
        wanted = everything(model, optimizers)
        saving = rg.save(f"{folder}/{kind}", model, optimizers, async_=True)
        train(model, optimizers, rank, 1, 2)
        if kind == "adamw":
            saving.wait()  # the other is waited for by the save that comes next
        other = new(5)
        rg.shard(other, 2)
        others = OPTIMIZERS[kind](other)
        rg.save(f"{folder}/next", other, others)
        rg.load(f"{folder}/{kind}", other, others)
        wrong += [f"{kind}{where}" for where in differences(wanted, everything(other, others))]
    dist.barrier()
    return wrong


def test_training_goes_on_meanwhile(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_meanwhile, str(tmp_path)) == [[], []]


def _wrong_meanwhile(rank: int, world: int, path: str) -> str:
    model = new(3)
    rg.shard(model, 3)
    saving = rg.save(path, model, async_=True)
    with pytest.raises(rg.CheckpointError) as caught:
        saving.wait()
    dist.barrier()
    return str(caught.value)


def test_what_goes_wrong_meanwhile(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").touch()
    for message in ranks(2).run(_wrong_meanwhile, str(tmp_path / "papers")):
        assert message.startswith("rg.save() failed: rank 0: path=")
