"""What one rank has otherwise than the others: an error, another folder, buffers of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn

import retrograde as rg
from tests.checkpoint.runs import new
from tests.harness import Ranks


# ---- errors
class _Loader:
    """Has a state that one rank cannot tell."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def state_dict(self) -> dict[str, int]:
        if self._broken:
            raise ValueError("the loader has not begun")
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nothing of it was saved")


def _users_code_fails(rank: int, world: int, path: str) -> tuple[str, str]:
    model = new(3)
    rg.shard(model, 3)
    with pytest.raises((rg.CheckpointError, ValueError)) as caught:
        rg.save(path, model, extra={"loader": _Loader(rank == 1)})
    dist.barrier()
    return type(caught.value).__name__, str(caught.value)


def test_an_error_of_users_code_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    """Its rank raises it as it is; the others do not wait for that rank until the time-out."""
    told, own = ranks(2).run(_users_code_fails, str(tmp_path / "a"), timeout=20)
    assert told == ("CheckpointError", "rg.save() failed on rank 1: ValueError: the loader has not begun")
    assert own == ("ValueError", "the loader has not begun")
    assert not (tmp_path / "a").exists()


def _one_rank_has_waited(rank: int, world: int, folder: str) -> str:
    model = new(3)
    rg.shard(model, 3)
    saving = rg.save(f"{folder}/papers", model, async_=True)
    if rank == 0:
        with pytest.raises(rg.CheckpointError):
            saving.wait()
    with pytest.raises(rg.CheckpointError) as caught:
        rg.save(f"{folder}/next", model)
    rg.save(f"{folder}/next", model)
    dist.barrier()
    return str(caught.value)


def test_a_failed_save_of_which_one_rank_knows(ranks: Ranks, tmp_path: Path) -> None:
    """The next save tells the ranks that have not waited for it, and the rank that has does not save alone."""
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").touch()
    knows, learns = ranks(2).run(_one_rank_has_waited, str(tmp_path), timeout=20)
    assert knows.startswith("rg.save() failed on rank 1: rg.save() failed: rank 0: path=")
    assert learns.startswith("rg.save() failed: rank 0: path=")
    assert (tmp_path / "next").is_dir()


# ---- folders
def _each_its_own(rank: int, world: int, folder: str) -> tuple[str, list[float]]:
    model = new(3)
    rg.shard(model, 3)
    for step in range(world):
        rg.save(f"{folder}/step-{step}", model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    with pytest.raises(rg.CheckpointError) as caught:
        rg.load(f"{folder}/step-{rank}", model)
    left = {float(value) for param in model.parameters() for value in param.full_tensor().unique()}
    dist.barrier()
    return str(caught.value), sorted(left)


def test_ranks_load_the_same_save(ranks: Ranks, tmp_path: Path) -> None:
    """A model of which each rank has taken its part from another step would be nobody's."""
    for message, left in ranks(2).run(_each_its_own, str(tmp_path)):
        assert message.startswith(f"rg.load(): rank 0 has {tmp_path}/step-0 and rank 1 {tmp_path}/step-1, which were")
        assert left == [9.0]


def _from_a_copy(rank: int, world: int, folder: str) -> None:
    model = new(3)
    rg.shard(model, 3)
    rg.save(f"{folder}/rank-0", model)
    if rank == 1:
        shutil.copytree(f"{folder}/rank-0", f"{folder}/rank-1")
    rg.load(f"{folder}/rank-{rank}", model)
    dist.barrier()


def test_each_rank_may_have_a_copy(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_from_a_copy, str(tmp_path))


# ---- buffers
class Normed(nn.Module):
    """Each rank's own batches make its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 2)
        self.register_buffer("alike", torch.arange(3.0))
        self.note: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x)).sum()

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _own_statistics(rank: int, world: int, path: str, async_: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model, other = Normed(), Normed()
    rg.shard(model, 3)
    rg.shard(other, 2)
    for step in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))
        model(x).backward()
    model.note = f"rank {rank}"
    wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rg.save(path, model, async_=async_).wait()
    loaded = rg.load(path, other)
    wrong = [name for name, buffer in other.named_buffers() if not torch.equal(buffer, wanted[name])]
    dist.barrier()
    return {"wrong": wrong, "note": other.note, "notes": loaded.notes, "buffers": wanted}


@pytest.mark.parametrize("async_", (False, True))
def test_buffers_of_each_rank(ranks: Ranks, tmp_path: Path, async_: bool) -> None:
    """Going on is not having stopped; at another number of ranks it is with the first rank's, never with a mixture."""
    path = tmp_path / "a"
    by_rank = ranks(2).run(_own_statistics, str(path), async_)
    for rank, said in enumerate(by_rank):
        assert (said["wrong"], said["note"], said["notes"]) == ([], f"rank {rank}", ())
    first, second = (said["buffers"] for said in by_rank)
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    alone = Normed()
    loaded = rg.load(path, alone)
    assert all(torch.equal(buffer, first[name]) for name, buffer in alone.named_buffers())
    assert alone.note == "rank 0"
    differing = ["_extra_state", "norm.running_mean", "norm.running_var"]
    assert list(loaded.notes[1:]) == [f"{name}: each of 2 ranks had its own, and here are 1" for name in differing]
    names = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    assert "model.alike" in names and not any("alike" in name for name in names if name != "model.alike")


def _exported(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Normed()
    rg.shard(model, 3)
    for buffer in model.buffers():
        buffer.fill_(rank)
    rg.export(folder, model, file_size=30)
    dist.barrier()
    return {name: param.full_tensor().clone() for name, param in model.named_parameters()}


def test_exported_buffers_are_those_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks take turns with the files, and each buffer is in another."""
    weights = ranks(2).run(_exported, str(tmp_path))[0]
    found = Normed()
    rg.load_pretrained(found, tmp_path, strict=False)
    assert {float(buffer.double().max()) for buffer in found.buffers()} == {0.0}
    assert all(torch.equal(param, weights[name]) for name, param in found.named_parameters())
