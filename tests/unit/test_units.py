"""Which parameters form a unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from retrograde import ShardingError
from retrograde.layout import UnitSpec, find_units
from tests.small import BLOCKS, Block, Small, build


def _table(specs: list[UnitSpec]) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in specs}


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _partition(model: nn.Module, specs: list[UnitSpec]) -> None:
    """Every parameter once, under the name torch gives it."""
    assert sorted(name for spec in specs for name, _ in spec.params) == sorted(_names(model))
    named = dict(model.named_parameters())
    assert all(named[name] is param for spec in specs for name, param in spec.params)


def test_auto_takes_repeated_blocks() -> None:
    model = build()
    specs = find_units(model, "auto")
    _partition(model, specs)
    table = _table(specs)
    assert list(table) == ["(root)", *(f"blocks.{i}" for i in range(BLOCKS))]
    assert table["(root)"] == ["embed.weight", "head.weight", "head.bias"]
    assert table["blocks.1"] == [name for name in _names(model) if name.startswith("blocks.1.")]


def test_auto_is_outermost_and_needs_siblings() -> None:
    inner = [nn.Sequential(Block(), Block()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ModuleList(inner), nn.Sequential(Block()))
    specs = find_units(model, "auto")
    _partition(model, specs)
    # Linears have no submodules; a block without a sibling belongs to the root; blocks in blocks are not cut out.
    assert list(_table(specs)) == ["(root)", "2.0", "2.1"]
    assert "3.0.up.weight" in _table(specs)["(root)"]
    assert _table(find_units(nn.Linear(2, 2), "auto")) == {"(root)": ["weight", "bias"]}


@pytest.mark.parametrize("units", (Block, (Block,), [Block]), ids=("class", "tuple", "list"))
def test_classes(units: Any) -> None:
    model = build()
    assert _table(find_units(model, units)) == _table(find_units(model, "auto"))


def test_several_classes_nest() -> None:
    model = build()
    specs = find_units(model, (Block, nn.Linear))
    _partition(model, specs)
    table = _table(specs)
    assert table["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert table["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert table["(root)"] == ["embed.weight"] and table["head"] == ["head.weight", "head.bias"]


def test_the_model_itself_is_the_root() -> None:
    assert next(iter(_table(find_units(build(), (Small, Block))))) == "(root)"
    block = Block()
    assert list(_table(find_units(block, Block))) == ["(root)"]


def test_predicate() -> None:
    model = build()
    specs = find_units(model, lambda module: isinstance(module, nn.Embedding))
    _partition(model, specs)
    assert list(_table(specs)) == ["(root)", "embed"]
    everything = find_units(model, lambda module: True)
    _partition(model, everything)
    assert "(root)" not in _table(everything), "a unit without parameters is none"


def test_tied_parameters_have_one_home() -> None:
    model = build()
    model.head.weight = model.embed.weight
    model.blocks[3].up.weight = model.blocks[0].up.weight
    specs = find_units(model, "auto")
    _partition(model, specs)
    table = _table(specs)
    assert table["(root)"] == ["embed.weight", "head.bias"]
    assert "blocks.0.up.weight" in table["blocks.0"]
    assert not any("up.weight" in name for name in table["blocks.3"])


def test_a_module_in_two_places() -> None:
    """A block that two parents share is one unit, where it is met first."""
    shared = Block()
    model = nn.Sequential(nn.ModuleDict({"x": shared, "y": Block()}), nn.ModuleList([Block(), shared, Block()]))
    specs = find_units(model, Block)
    _partition(model, specs)
    assert list(_table(specs)) == ["0.x", "0.y", "1.0", "1.2"]


def test_lists_are_not_blocks() -> None:
    """Encoder and decoder are two lists side by side; what repeats is in them."""
    model = nn.Module()
    model.encoder = nn.ModuleList(Block() for _ in range(2))
    model.decoder = nn.ModuleList(Block() for _ in range(3))
    model.heads = nn.ModuleDict({"a": Block(), "b": Block()})
    specs = find_units(model, "auto")
    _partition(model, specs)
    expected = ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2", "heads.a", "heads.b"]
    assert list(_table(specs)) == expected


def test_mixed_dtypes_become_units_of_their_own() -> None:
    model = build()
    model.blocks[1].norm.double()
    model.embed.to(torch.bfloat16)
    specs = find_units(model, "auto")
    _partition(model, specs)
    assert all(len({param.dtype for _, param in spec.params}) == 1 for spec in specs)
    table = _table(specs)
    assert table["blocks.1[float64@cpu]"] == ["blocks.1.norm.weight", "blocks.1.norm.bias"]
    assert len(table["blocks.1[float32@cpu]"]) == 4
    assert table["(root)[bfloat16@cpu]"] == ["embed.weight"] and "blocks.0" in table
    model.blocks[2].up.to("meta")
    assert "blocks.2[float32@meta]" in _table(find_units(model, "auto"))


def test_only_wanted_parameters() -> None:
    model = build()
    new = {id(p) for p in model.blocks[2].up.parameters()}
    assert _table(find_units(model, "auto", wanted=lambda p: id(p) in new)) == {
        "blocks.2": ["blocks.2.up.weight", "blocks.2.up.bias"]
    }
    assert find_units(nn.Dropout(), "auto") == []


@pytest.mark.parametrize(
    ("units", "match"),
    (
        ("every", r'units=\'every\' is not known; give "auto", module classes or a predicate'),
        (nn.LSTM, r"no module of class LSTM in Small; its classes are Block, Embedding, LayerNorm, Linear, Module"),
        ([Block, nn.GRU], r"no module of class GRU"),
        (5, r"units=5 is not known"),
        ([Block, 5], r"units.*5.*is not known|units: 5 is not a module class"),
    ),
    ids=str,
)
def test_wrong_units(units: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=match):
        find_units(build(), units)


def test_small_units_take_in_the_next() -> None:
    model = build()
    size = sum(p.nbytes for p in model.blocks[0].parameters())
    joined = find_units(model, "auto", size + 1)
    _partition(model, joined)
    assert list(_table(joined)) == ["(root)", "blocks.0+blocks.1", "blocks.2+blocks.3"]
    assert list(_table(find_units(model, "auto", size))) == list(_table(find_units(model, "auto")))
    everything = "+".join(f"blocks.{i}" for i in range(BLOCKS))
    assert list(_table(find_units(model, "auto", float("inf")))) == ["(root)", everything]


def test_units_of_other_dtypes_are_not_joined() -> None:
    model = build()
    model.blocks[1].double()
    names = list(_table(find_units(model, "auto", float("inf"))))
    assert names == ["(root)", "blocks.0", "blocks.1", "blocks.2+blocks.3"]
