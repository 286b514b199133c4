"""Which parameters are whole, and who holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.layout import Loads, UnitSpec, find_units
from tests.small import Small, build

UNLIMITED = float("inf")


def _units(model: nn.Module, whole: Any, join: float = 0) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in find_units(model, "auto", join, whole=whole)}


def _whole(model: nn.Module, whole: Any) -> set[str]:
    return {name for spec in find_units(model, "auto", whole=whole) if spec.whole for name, _ in spec.params}


def _matrices(model: Small) -> list[str]:
    return [name for name, param in model.named_parameters() if param.dim() == 2]


# ---- what users say
def test_words_and_predicates() -> None:
    model = build()
    assert _whole(model, None) == set()
    assert _whole(model, "matrices") == set(_matrices(model))
    assert _whole(model, "all") == {name for name, _ in model.named_parameters()}
    assert _whole(model, lambda name, param: name.endswith("up.bias")) == {f"blocks.{i}.up.bias" for i in range(4)}


def test_parameters_modules_and_names() -> None:
    model = build()
    up = {"blocks.0.up.weight", "blocks.0.up.bias"}
    assert _whole(model, [model.head.weight, "blocks.0.up"]) == {"head.weight", *up}
    assert _whole(model, [model.blocks[0].up, "embed.weight"]) == {"embed.weight", *up}
    assert _whole(model, model.blocks) == {name for name, _ in model.named_parameters() if "blocks" in name}
    assert _whole(model, tuple(model.head.parameters())) == {"head.weight", "head.bias"}
    assert _whole(model, []) == set()


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ("vectors", 'whole=\'vectors\' is not known; give "matrices", "all"'),
        (3, "whole=3 is not a list"),
        (["blocks.9"], "whole: the model has no parameter or module 'blocks.9'"),
        ([nn.Parameter(torch.ones(2))], "whole: Parameter of shape [2] is not a parameter of the model"),
        ([nn.Linear(2, 2)], "whole: Linear is not a module of the model"),
        (nn.Linear(2, 2), "whole: Linear is not a module of the model"),
    ],
    ids=str,
)
def test_what_is_not_there(whole: Any, said: str) -> None:
    with pytest.raises(rg.ShardingError) as refused:
        find_units(build(), "auto", whole=whole)
    assert str(refused.value).startswith(said)


# ---- units
def test_whole_parameters_are_a_unit_beside_the_others() -> None:
    units = _units(build(), "matrices")
    assert list(units)[:4] == ["(root)[whole]", "(root)", "blocks.0", "blocks.0[whole]"]
    assert units["blocks.0[whole]"] == ["blocks.0.up.weight", "blocks.0.down.weight"]
    assert units["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.up.bias", "blocks.0.down.bias"]


def test_units_are_joined_with_their_like() -> None:
    """As they stand beside each other: whole with whole only."""
    for name, params in _units(build(), "matrices", UNLIMITED).items():
        assert ("[whole]" in name) == all(param in _matrices(build()) for param in params)


# ---- who holds them
def _owners(specs: list[UnitSpec]) -> dict[str, int]:
    return {
        name: shard
        for spec in specs
        if spec.shard_of is not None
        for (name, _), shard in zip(spec.params, spec.shard_of, strict=True)
    }


class Matrices(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(size, 1) for size in sizes)


def test_the_largest_goes_first_to_the_rank_with_the_least() -> None:
    loads = Loads(3)
    specs = loads.assign(find_units(Matrices(2, 9, 4, 4, 7, 1), "auto", whole="all"))
    assert _owners(specs) == {"all.1": 0, "all.4": 1, "all.0": 1, "all.2": 2, "all.3": 2, "all.5": 2}
    assert loads.elements == [9, 9, 9]
    assert specs[0].shard_of == (0, 1, 1, 2, 2, 2), "those of one owner lie together"
    assert [name for name, _ in specs[0].params] == ["all.1", "all.0", "all.4", "all.2", "all.3", "all.5"]


def test_equals_go_round_and_units_share_one_balance() -> None:
    loads = Loads(2)
    specs = loads.assign(find_units(build(), "auto", whole="matrices"))
    assert loads.elements == [2 * 4 * 36 * 12 // 2 + 17 * 12] * 2
    owners = _owners(specs)
    assert [owners[f"blocks.{i}.up.weight"] for i in range(4)] == [0] * 4
    assert [owners[f"blocks.{i}.down.weight"] for i in range(4)] == [1] * 4


def test_those_that_come_later_are_added_to_the_balance() -> None:
    loads = Loads(2)
    loads.assign(find_units(Matrices(5), "auto", whole="all"))
    assert _owners(loads.assign(find_units(Matrices(3, 1), "auto", whole="all"))) == {"all.0": 1, "all.1": 1}


def test_the_others_have_no_owner() -> None:
    specs = Loads(2).assign(find_units(build(), "auto"))
    assert [spec.shard_of for spec in specs] == [None] * 5
