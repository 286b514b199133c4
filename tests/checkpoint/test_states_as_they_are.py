"""What modules and optimizers give as their state, in whatever form, comes back in that form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.named_state import merged_groups
from tests.harness import Ranks
from tests.stages import OPPOSITE_STAGES


class Noted(nn.Linear):
    """With a state that is no tensor."""

    note: Any = "new"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


STATES: dict[str, Any] = {
    "nothing in it": {},
    "nothing further in": {"a": {}, "b": [], "c": [{}]},
    "numbers as keys": {1: 0.5, 2: {3: 4}},
    "other keys": {("a", 1): 2.0, None: 1},
    "a tensor under a number": {0: torch.arange(3)},
    "None": None,
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)  # torch's optimizers load no texts, so there are none here


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_extra_state_of_a_module(tmp_path: Path, state: Any) -> None:
    """What is taken apart by its keys would lose a dictionary without entries, and keys that are no texts."""
    model = Noted(2, 2)
    model.note = state
    rg.save(tmp_path / "a", model)
    other = Noted(2, 2)
    rg.load(tmp_path / "a", other)
    assert _same(state, other.note)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_state_of_an_optimizer(tmp_path: Path, state: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters()) for _ in range(2))
    optimizer.state[model.weight] = {"kept": state, "moment": torch.ones(2, 2)}
    optimizer.state[model.bias] = {}
    rg.save(tmp_path / "a", model, optimizer)
    rg.load(tmp_path / "a", model, other)
    assert _same(state, other.state[model.weight]["kept"])
    assert torch.equal(other.state[model.weight]["moment"], torch.ones(2, 2))


# ---- entries that hooks have made
def _halved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Save weights in another dtype, as programs do to save room."""
    state[f"{prefix}weight"] = state[f"{prefix}weight"].detach().to(torch.bfloat16)


def _hooked(rank: int, world: int, stage: int, path: str) -> None:
    models = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        model[1].register_state_dict_post_hook(_halved)
        models.append(model)
    saved, loaded = models
    wanted = [param.detach().clone() for param in saved.parameters()]
    wanted[2] = wanted[2].to(torch.bfloat16).float()
    rg.shard(saved, stage)
    rg.shard(loaded, stage)
    rg.save(path, saved)
    found = rg.load(path, loaded)
    assert sorted(found.weights) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert all(
        torch.equal(param.full_tensor(), value) for param, value in zip(loaded.parameters(), wanted, strict=True)
    )
    dist.barrier()


@OPPOSITE_STAGES
def test_entries_that_a_hook_has_made_are_loaded(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """To fill what the hook has made would leave the weights as they are."""
    ranks(2).run(_hooked, stage, str(tmp_path / "a"))


# ---- what an optimizer keeps for no parameter
class Counting(torch.optim.SGD):
    """Counts its steps, for all parameters at once."""

    def step(self, closure: Any = None) -> Any:
        self.state["common"]["steps"] = self.state["common"].get("steps", 0) + 1
        return super().step(closure)


def _counted(rank: int, world: int, path: str) -> list[Any]:
    models = [nn.Linear(3, 3) for _ in range(2)]
    for model in models:
        rg.shard(model, 3)
    saved, loaded = (Counting(model.parameters(), momentum=0.5) for model in models)
    for _ in range(3):
        saved.step()
    rg.save(path, models[0], saved)
    rg.load(path, models[1], loaded)
    dist.barrier()
    return [loaded.state["common"], len(loaded.state)]


def test_what_an_optimizer_keeps_for_all_parameters(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_counted, str(tmp_path / "a")) == [[{"steps": 3}, 1]] * 2


def test_what_two_optimizers_keep_for_all_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first, second = Counting([model.weight]), Counting([model.bias])
    first.step()
    rg.save(tmp_path / "a", model, [first, second])
    loaded = rg.load(tmp_path / "a", model, [first, second])
    (note,) = loaded.notes
    assert note == "optimizer: common is of no parameter, and which of the optimizers has kept it is not known"
    first.step()
    second.step()
    with pytest.raises(rg.CheckpointError, match="two of them keep something under 'common'; save them as extra"):
        rg.save(tmp_path / "a", model, [first, second])


# ---- groups with names
def _named(*parts: nn.Module) -> torch.optim.Optimizer:
    """As torch has it: `optimizer(model.named_parameters())`. A group for each part."""
    return torch.optim.AdamW([{"params": list(part.named_parameters("its"))} for part in parts], lr=0.5)


@pytest.mark.parametrize("split", (False, True), ids=("joined", "split"))
def test_groups_with_names(tmp_path: Path, split: bool) -> None:
    """Groups with the same options may be joined and split; the names are those of the parameters here."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    parts = list(model)
    saved, loaded = _named(*parts), _named(model)
    if split:
        saved, loaded = loaded, saved
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    names = [group["param_names"] for group in loaded.param_groups]
    for group in loaded.param_groups:
        group["lr"] = 0.25
    rg.save(tmp_path / "a", model, saved)
    rg.load(tmp_path / "a", model, loaded)
    assert [group["param_names"] for group in loaded.param_groups] == names
    assert {group["lr"] for group in loaded.param_groups} == {0.5}
    assert all(_same(saved.state[param], loaded.state[param]) for param in model.parameters())


def test_groups_with_names_of_several_ranks() -> None:
    """Ranks of a pipeline have other parameters, under other names, in the same group."""
    by_rank = [[{"params": [name], "param_names": [name], "lr": 0.5}] for name in ("a", "b")]
    assert merged_groups(by_rank) == [{"params": ["a", "b"], "lr": 0.5}]


# ---- tied here, and not where it was saved
class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        if tied:
            self.second.weight = self.first.weight


def _load(model: nn.Module, path: str) -> None:
    rg.load(path, model)


def _tied_here(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(3)
    saved, plain = Pair(False), Pair(True)
    plain.load_state_dict(saved.state_dict())
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    rg.shard(saved, 3)
    rg.save(f"{folder}/saved", saved)
    rg.export(f"{folder}/exported", saved)
    for load, source in ((_load, "saved"), (rg.load_pretrained, "exported")):
        model = Pair(True)
        rg.shard(model, 2)
        load(model, f"{folder}/{source}")
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        dist.barrier()


def test_of_several_values_for_a_tied_parameter_the_last_counts(ranks: Ranks, tmp_path: Path) -> None:
    """As in torch, where each is loaded after the other."""
    ranks(2).run(_tied_here, str(tmp_path))
