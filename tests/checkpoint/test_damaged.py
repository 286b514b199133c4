"""A checkpoint that is not what was saved: the error has file and parameter, nothing changes, nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

import retrograde as rg
from retrograde.checkpoint.formats.distributed import Files
from tests.checkpoint.runs import OPTIMIZERS, differences, everything, new, train

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "checkpoint"
    model, optimizers = _run(3)
    rg.save(path, model, optimizers, extra={"step": 1})
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def _run(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = new(seed)
    optimizers = OPTIMIZERS["adamw"](model)
    train(model, optimizers, 0, 0)
    return model, optimizers


def refused(path: Path, words: str) -> str:
    """The error, with nothing changed."""
    model, optimizers = _run(5)
    before = everything(model, optimizers)
    with pytest.raises(rg.CheckpointError, match=words) as caught:
        rg.load(path, model, optimizers)
    assert differences(before, everything(model, optimizers)) == []
    return str(caught.value)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def place_of(folder: Path, key: str) -> Any:
    files = Files(folder)
    try:
        return next(place for (name, _), place in files.contents().places.items() if name == key)
    finally:
        files.close()


def test_the_copy_is_fine(copy: Path) -> None:
    model, optimizers = _run(5)
    rg.load(copy, model, optimizers)
    assert differences(everything(*_run(3)), everything(model, optimizers)) == []


# ---- bytes
@pytest.mark.parametrize("key", ("model.embed.weight", "optimizer.state.blocks.1.up.weight.exp_avg"))
@pytest.mark.parametrize("where", (0.0, 0.5, 1.0))
def test_a_flipped_byte(copy: Path, monkeypatch: pytest.MonkeyPatch, key: str, where: float) -> None:
    """With blocks as small as this checkpoint, the parameter is the one."""
    place = place_of(copy, key)
    flip(copy / DATA, place.offset + int(where * (place.length - 1)))
    assert DATA in refused(copy, "checksum")


def test_the_parameter_is_named(tmp_path: Path) -> None:
    """In a checkpoint of many blocks."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    rg.save(tmp_path / "checkpoint", model)
    place = place_of(tmp_path / "checkpoint", "model.4.weight")
    flip(tmp_path / "checkpoint" / DATA, place.offset + place.length // 2)
    with pytest.raises(rg.CheckpointError, match=r"__0_0\.distcp: bytes .* model\.4\.weight") as caught:
        rg.load(tmp_path / "checkpoint", model)
    assert "model.0.weight" not in str(caught.value)


def test_a_missing_byte(copy: Path) -> None:
    os.truncate(copy / DATA, (copy / DATA).stat().st_size - 1)
    message = refused(copy, "bytes, and .* were saved")
    assert DATA in message
    assert "of model." in message or "of optimizer." in message


def test_a_missing_file(copy: Path) -> None:
    (copy / DATA).unlink()
    assert "model.blocks.0.down.bias" in refused(copy, r"__0_0\.distcp is missing")


@pytest.mark.parametrize("name", (".metadata", "retrograde.json"))
def test_metadata_and_marker(copy: Path, name: str) -> None:
    size = (copy / name).stat().st_size
    for at in (0, size // 2, size - 2):
        flip(copy / name, at)
        refused(copy, name.replace(".", r"\."))
        flip(copy / name, at)


def test_without_the_marker_it_is_a_plain_one(copy: Path) -> None:
    """As torch's own, which has no checksums."""
    (copy / "retrograde.json").unlink()
    model, optimizers = _run(5)
    assert rg.load(copy, model, optimizers).origin == "torch.distributed.checkpoint"
    flip(copy / DATA, place_of(copy, "model.embed.weight").offset)  # a zip's first byte
    refused(copy, "embed.weight")


# ---- hostile ones
class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.victim}",)


def _metadata(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


def _hostile_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Without a marker, which who writes such a thing would make fit."""
    metadata = _metadata(folder)
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
    (folder / "retrograde.json").unlink()


def test_metadata_are_not_executed(copy: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    _hostile_metadata(copy, lambda metadata: Evil(victim))
    assert "posix.system" in refused(copy, "nothing of it was executed")
    _again(copy, lambda metadata: setattr(metadata, "planner_data", Evil(victim)))
    assert "posix.system" in refused(copy, "nothing of it was executed")
    assert not victim.exists()


def _again(folder: Path, change: Callable[[Metadata], object]) -> None:
    (folder / "retrograde.json").touch()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, {}, {})))
    _hostile_metadata(folder, change)


def test_a_pickle_cannot_change_classes(copy: Path) -> None:
    """It may name a class and set attributes of it: not of one that anybody else has."""
    tampering = b"\x80\x02cpathlib\nPosixPath\n}(X\x06\x00\x00\x00existsX\x01\x00\x00\x00xu\x86b."
    tampering = tampering.replace(b"}(X", b"N}(X", 1)
    (copy / ".metadata").write_bytes(tampering)
    (copy / "retrograde.json").unlink()
    exists = Path.exists
    refused(copy, "metadata")
    assert Path.exists is exists


@pytest.mark.parametrize("name", ("../outside", "/etc/passwd", "sub/file"))
def test_files_outside_are_not_read(copy: Path, name: str) -> None:
    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    _hostile_metadata(copy, change)
    assert name in refused(copy, "not in the checkpoint's own folder")


def test_places_beyond_the_end(copy: Path) -> None:
    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset += 1 << 40

    _hostile_metadata(copy, change)
    refused(copy, "should be at")


def test_shapes_that_the_file_has_not(copy: Path) -> None:
    """A file that says less than the metadata: nothing is read beyond it, and no memory is taken."""

    def change(metadata: Metadata) -> None:
        for key, saved in metadata.state_dict_metadata.items():
            if key.endswith(".bias.step"):
                saved.size = torch.Size([1 << 40])
                saved.chunks[0].sizes = torch.Size([1 << 40])
                saved.chunks[0].offsets = torch.Size([0])
        places = metadata.storage_data
        for index in [index for index in places if index.fqn.endswith(".bias.step")]:
            places[type(index)(index.fqn, [0])] = places.pop(index)

    _hostile_metadata(copy, change)
    refused(copy, "step")


def _replace_item(folder: Path, key: str, content: bytes) -> None:
    """Something else at the place of an item, and a marker that fits it is not needed."""
    metadata = _metadata(folder)
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == key)
    with (folder / DATA).open("r+b") as file:
        place.offset = file.seek(0, os.SEEK_END)
        place.length = len(content)
        file.write(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "retrograde.json").unlink()


def _torch_file(tmp_path: Path, value: Any) -> bytes:
    torch.save(value, tmp_path / "file", pickle_protocol=2)
    return (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("key", ("extra.step", "model.embed.weight", "optimizer.param_groups.0.lr"))
def test_items_are_not_executed(copy: Path, tmp_path: Path, key: str) -> None:
    victim = tmp_path / "victim"
    _replace_item(copy, key, _torch_file(tmp_path, Evil(victim)))
    refused(copy, key.replace(".", r"\."))
    assert not victim.exists()


def test_a_tensor_that_claims_more_than_it_has(copy: Path, tmp_path: Path) -> None:
    """Its description asks for elements beyond its storage."""
    small = torch.zeros(2)
    file = tmp_path / "file"
    torch.save(small, file)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(parts)).split("/")[0]
    shape = parts[f"{root}/data.pkl"].replace(b"K\x02\x85", b"K\x63\x85", 1)
    assert shape != parts[f"{root}/data.pkl"]
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, shape if name.endswith("data.pkl") else content)
    _replace_item(copy, "model.embed.weight", file.read_bytes())
    refused(copy, "does not fit")


def test_a_marker_is_data(copy: Path) -> None:
    text = json.loads((copy / "retrograde.json").read_text().splitlines()[0])
    assert set(text) == {"saved_at", "world", "files", "block", "version"}
