"""Weights as safetensors files: streamed out, read in by shards, in the form that others use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import retrograde as rg
from benchmarks.live import Live
from retrograde.checkpoint import exporting
from retrograde.cli import main
from tests.checkpoint.runs import buffered, differences, new
from tests.harness import Ranks
from tests.small import Small

INDEX = "model.safetensors.index.json"
SIZE = 4000  # bytes: less than a block of the small model has


def read(folder: Path) -> dict[str, Tensor]:
    """By the library, as anybody would."""
    if not (folder / INDEX).is_file():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    found: dict[str, Tensor] = {}
    for name in set(index["weight_map"].values()):
        part = load_file(folder / name)
        assert all(index["weight_map"][key] == name for key in part)
        found |= part
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


# ---- out
def _exported(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], int, int]:
    model = buffered(3)
    engine = rg.shard(model, 3)
    wanted = plain_state(model)
    engine.pager.release()
    engine.ledger.clear()
    rg.export(folder, model, file_size=SIZE)
    pages = [unit.layout.page_bytes for unit in engine.units]
    assert engine.ledger.peak - engine.ledger.resident <= sum(sorted(pages)[-2:])
    gathers = max(engine.ledger.count("gather", unit.name) for unit in engine.units)
    dist.barrier()
    return wanted, gathers, len(engine.units)


def test_a_sharded_model_is_streamed(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, gathers, _ in ranks(2).run(_exported, str(tmp_path)):
        found = read(tmp_path)
        assert differences(wanted, {name: found[name] for name in wanted}) == []
        assert found.keys() == wanted.keys()
        assert gathers <= 2  # a unit that lies in two files of one rank, with another's between them
    files = sorted(tmp_path.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    largest = max(tensor.nbytes for tensor in found.values())
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            count = len(opened.keys())
        assert count == 1 or sum(each.nbytes for each in load_file(file).values()) <= SIZE
    assert largest < SIZE
    assert not list(tmp_path.glob("*.partial"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def test_one_file_another_dtype_and_a_tied_weight(tmp_path: Path) -> None:
    """In one process, without sharding."""
    model = Tied()
    model.register_buffer("count", torch.tensor(3))
    assert rg.export(tmp_path, model, dtype=torch.bfloat16) == [tmp_path / "model.safetensors"]
    found = read(tmp_path)
    assert differences(found, {"embed.weight": model.embed.weight.detach().bfloat16(), "count": torch.tensor(3)}) == []
    other = Tied()
    other.register_buffer("count", torch.tensor(0))
    rg.load_pretrained(other, tmp_path)
    assert torch.equal(other.head.weight, model.embed.weight.bfloat16().float())


# ---- offline
def _saved(rank: int, world: int, path: str) -> dict[str, Tensor]:
    model = buffered(3)
    rg.shard(model, 3)
    rg.save(path, model, torch.optim.SGD(model.parameters()))
    return plain_state(model)


def test_the_command(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ranks(2).run(_saved, str(tmp_path / "checkpoint"))[0]
    with Live(peak=True) as live:
        assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--file-size", str(SIZE)]) == 0
    found = read(tmp_path / "out")
    assert 0 < live.peak <= max(each.nbytes for each in found.values())  # one tensor at a time
    assert differences(wanted, {name: found[name] for name in wanted}) == []
    assert len(capsys.readouterr().out.splitlines()) == len(list((tmp_path / "out").glob("*.safetensors")))
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "is not there" in capsys.readouterr().err


# ---- in
def _filled(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Small()
    rg.shard(model, 3)
    loaded = rg.load_pretrained(model, folder)
    assert loaded.origin == "safetensors"
    return plain_state(model)


def test_a_model_from_the_meta_device_is_filled(ranks: Ranks, tmp_path: Path) -> None:
    model = new(3)
    save_file(plain_state(model), tmp_path / "model.safetensors")
    for found in ranks(2).run(_filled, str(tmp_path)):
        assert differences(plain_state(model), found) == []


def test_what_does_not_fit(tmp_path: Path) -> None:
    model = new(3)
    state = plain_state(model)
    del state["head.bias"]
    save_file(state, tmp_path / "model.safetensors")
    before = plain_state(model)
    with pytest.raises(rg.CheckpointError, match=r"it has no head\.bias"):
        rg.load_pretrained(model, tmp_path)
    state["head.bias"] = torch.zeros(3)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(rg.CheckpointError, match=r"head\.bias has shape \(3,\) in the checkpoint and \(17,\) here"):
        rg.load_pretrained(model, tmp_path)
    with pytest.raises(rg.CheckpointError, match="give a folder with one of them"):
        rg.load_pretrained(model, tmp_path / "nothing")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"head.bias": "../model.safetensors"}}))
    with pytest.raises(rg.CheckpointError, match="not in its folder"):
        rg.load_pretrained(model, tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(rg.CheckpointError, match=r"model\.safetensors"):
        rg.load_pretrained(model, tmp_path)
    assert differences(before, plain_state(model)) == []


# ---- over an older export, and damaged
def _filled_with(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


@pytest.mark.parametrize("sizes", ((SIZE, 300), (300, SIZE), (100, 300)), ids=("cut", "joined", "fewer"))
def test_an_export_replaces_the_one_before(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Whether programs look for an index first, as rg.load_pretrained does, or for a single file, as transformers."""
    (tmp_path / "model-of-mine.safetensors").touch()
    for value, size in zip((1.0, 2.0), sizes, strict=True):
        written = rg.export(tmp_path, _filled_with(value), file_size=size)
    there = {path.name for path in tmp_path.iterdir()} - {"model-of-mine.safetensors"}
    assert there == {path.name for path in written} | ({INDEX} if len(written) > 1 else set())
    found = _filled_with(0.0)
    rg.load_pretrained(found, tmp_path)
    assert all(bool((param == 2.0).all()) for param in found.parameters())


def test_an_interrupted_export_is_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exports of equally many files have the same names: the second is interrupted after its first file."""
    rg.export(tmp_path, _filled_with(1.0), file_size=300)
    before, written = exporting.write_file, []

    def interrupted(*given: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(before(*given))

    monkeypatch.setattr(exporting, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rg.export(tmp_path, _filled_with(2.0), file_size=300)
    with pytest.raises(rg.CheckpointError, match="give a folder with one of them"):
        rg.load_pretrained(_filled_with(0.0), tmp_path)


@pytest.mark.parametrize("text", ('{"weight', "[1]", '{"metadata": {}}', '{"weight_map": {"a": 1}}', "\udcff"))
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(rg.CheckpointError, match=rf"{INDEX}: is not an index of safetensors files"):
        rg.load_pretrained(nn.Linear(2, 2), tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    """The index says which counts."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file(
            {"weight": torch.full((2, 2), value), f"{name}.own": torch.zeros(1)}, tmp_path / f"{name}.safetensors"
        )
    names = {"weight": "a.safetensors", "b.own": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    model = nn.Linear(2, 2, bias=False)
    rg.load_pretrained(model, tmp_path, strict=False)
    assert bool((model.weight == 1.0).all())
