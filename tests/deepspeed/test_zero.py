"""Whole parameters, gradients and optimizer state: `zero.Init`, `zero.GatheredParameters`, `utils.safe_*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde.deepspeed as deepspeed
from retrograde.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from retrograde.deepspeed.zero import GatheredParameters, Init
from tests.deepspeed.pair import Pair, WithLoss, config
from tests.harness import Ranks
from tests.reference import same
from tests.small import batch
from tests.stages import EACH_STAGE

Edit = Callable[[nn.Module], Any]
ADAM = {"type": "AdamW", "params": {"lr": 2**-4}}


def _adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW decays nothing unless it is told to."""
    return torch.optim.AdamW(params, lr=2**-4, weight_decay=0.0)


def _initialized_inside(rank: int, world: int) -> list[str]:
    """What the model's own code does to initialize it counts."""
    with Init(config_dict_or_path=config(3)):
        torch.manual_seed(3)
        model = WithLoss()
        nn.init.normal_(model.head.weight, std=0.5)
    torch.manual_seed(3)
    plain = WithLoss()
    nn.init.normal_(plain.head.weight, std=0.5)
    engine, *_ = deepspeed.initialize(model=model, config=config(3))
    state = engine.module.state_dict()
    wrong = [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)]
    dist.barrier()
    return wrong


def test_init(ranks: Ranks) -> None:
    assert ranks(2).run(_initialized_inside) == [[], []]


# ---- edits of one rank
@torch.no_grad()
def _through_parameters(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    parameters["head.bias"].fill_(0.25)
    parameters["head.weight"].data.mul_(0.5)
    nn.init.ones_(parameters["embed.weight"])
    parameters["blocks.1.up.weight"][1:3] = 2.0
    parameters["blocks.1.up.weight"].add_(1.0)  # twice the same one


@torch.no_grad()
def _through_modules(model: nn.Module) -> None:
    model.head.weight.mul_(0.5)
    model.head.weight.data.add_(0.25)
    model.blocks[2].up.weight[1] = 3.0
    nn.init.zeros_(model.embed.weight)
    model.blocks[0].norm.bias.copy_(model.blocks[0].norm.weight)


@torch.no_grad()
def _loaded(model: nn.Module) -> None:
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape))
        assert parameter.sum() != 0, name  # read on one rank alone


EDITS: dict[str, Edit] = {"parameters": _through_parameters, "modules": _through_modules, "loaded": _loaded}


def _edited_on_one_rank(rank: int, world: int, stage: int, modifier: int) -> list[str]:
    faults = []
    for name, edit in EDITS.items():
        pair = Pair(rank, world, config(stage))
        pair.engine.module.blocks[2].requires_grad_(False)
        with GatheredParameters(pair.engine.module.parameters(), modifier_rank=modifier):
            if rank == modifier:
                edit(pair.engine.module)
        edit(pair.plain)
        faults += [f"{name}: {wrong}" for wrong in pair.wrong_weights()]
        pair.engine.module.blocks[2].requires_grad_(True)
        pair.engine.backward(pair.engine(batch(rank)))
        pair.engine.step()
        pair.plain_play(lambda model, rank: model(batch(rank)).backward())
        pair.plain_step()
        faults += [f"{name}, trained: {wrong}" for wrong in pair.wrong_weights()]
        pair.close()
    return faults


@EACH_STAGE
@pytest.mark.parametrize("modifier", (0, 1))
def test_edits_of_one_rank_are_everybodys(ranks: Ranks, stage: int, modifier: int) -> None:
    assert ranks(2).run(_edited_on_one_rank, stage, modifier) == [[], []]


def _read_on_one_rank(rank: int, world: int, stage: int) -> tuple[bool, list[str], list[str]]:
    """Inside, a rank may compute with whole parameters alone, and a forward and backward run as always."""
    pair = Pair(rank, world, config(stage))
    engine = pair.engine
    plain = dict(pair.plain.named_parameters())
    with GatheredParameters([engine.module.head.weight, *engine.module.blocks[1].parameters()]):
        right = True
        if rank == 0:
            leaf = dict(engine.module.named_parameters())["head.weight"]
            right = torch.equal(leaf, plain["head.weight"]) and float(leaf.sum()) == float(plain["head.weight"].sum())
            right = right and torch.equal(leaf.detach().clone()[1], plain["head.weight"][1])
        engine.backward(engine(batch(rank)))
        open_inside = [unit.name for unit in engine.sharded.units if unit.page.storage is not None]
    pair.plain_play(lambda model, rank: model(batch(rank)).backward())
    wrong = pair.wrong_grads()
    pair.close()
    return right, wrong, open_inside


@EACH_STAGE
def test_reading_alone(ranks: Ranks, stage: int) -> None:
    for right, wrong, open_inside in ranks(2).run(_read_on_one_rank, stage):
        assert right and wrong == []
        assert stage < 3 or sorted(open_inside) == ["(root)", "blocks.1"]


def _edit_that_raises(rank: int, world: int, stage: int) -> list[str]:
    """What was edited before counts, on all ranks, and they go on."""
    pair = Pair(rank, world, config(stage))
    with pytest.raises(ZeroDivisionError):
        with GatheredParameters(pair.engine.module.head.bias, modifier_rank=1):
            if rank == 1:
                pair.engine.module.head.bias.data.fill_(0.5)
            raise ZeroDivisionError
    pair.plain.head.bias.data.fill_(0.5)
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


@EACH_STAGE
def test_an_exception_inside(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_edit_that_raises, stage) == [[], []]


def _before_sharding(rank: int, world: int) -> float:
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer.weight, modifier_rank=1):
        if rank == 1:
            layer.weight.data.fill_(7.0)
    with pytest.raises(deepspeed.ConfigError, match="modifier_rank=2 is not one of 2 ranks; give a rank, or None"):
        GatheredParameters(layer.weight, modifier_rank=2)
    return float(layer.weight.detach().mean())


def test_parameters_that_are_not_sharded_yet(ranks: Ranks) -> None:
    assert ranks(2).run(_before_sharding) == [7.0, 7.0]


# ---- safe_*
def _unequal(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> list[str]:
    return [name for name, value in wanted.items() if not same(found[name], value)]


def _read_safely(rank: int, world: int, stage: int) -> list[str]:
    pair = Pair(rank, world, config(stage, optimizer=ADAM), optimize=_adam)
    ours, theirs = dict(pair.engine.module.named_parameters()), dict(pair.plain.named_parameters())
    assert safe_get_full_grad(ours["head.weight"]) is None
    assert safe_get_full_optimizer_state(ours["head.weight"], "exp_avg") is None
    pair.engine.backward(pair.engine(batch(rank)))
    pair.plain_play(lambda model, rank: model(batch(rank)).backward())
    grads = {name: safe_get_full_grad(p) for name, p in ours.items()}
    faults = _unequal(grads, {name: p.grad for name, p in theirs.items()})
    shown = safe_get_full_grad(pair.engine.module.head.weight)  # not the parameter, but what shows it
    faults += [] if same(shown, theirs["head.weight"].grad) else ["module.weight"]
    pair.engine.step()
    pair.plain_step()
    weights = {name: safe_get_full_fp32_param(p) for name, p in ours.items()}
    faults += _unequal(weights, {name: p.detach() for name, p in theirs.items()})
    for key in ("exp_avg", "exp_avg_sq"):
        state = {name: safe_get_full_optimizer_state(p, key) for name, p in ours.items()}
        faults += _unequal(state, {name: pair.plain_optimizer.state[p][key] for name, p in theirs.items()})
    pair.close()
    return faults


def _written_safely(rank: int, world: int, stage: int) -> list[str]:
    """A gradient before an update; a weight and a state after it."""
    pair = Pair(rank, world, config(stage, optimizer=ADAM), optimize=_adam)
    ours, theirs = dict(pair.engine.module.named_parameters()), dict(pair.plain.named_parameters())
    bias, value = ours["head.bias"], torch.ones_like(theirs["head.bias"])
    pair.engine.backward(pair.engine(batch(rank)))
    pair.plain_play(lambda model, rank: model(batch(rank)).backward())
    safe_set_full_grad(bias, value)
    theirs["head.bias"].grad = value.clone()
    pair.engine.step()
    pair.plain_step()
    faults = pair.wrong_weights()
    safe_set_full_fp32_param(pair.engine.module.embed.weight, torch.zeros_like(theirs["embed.weight"]))
    safe_set_full_optimizer_state(bias, value, "exp_avg")
    found = {
        "weight": safe_get_full_fp32_param(ours["embed.weight"]),
        "state": safe_get_full_optimizer_state(bias, "exp_avg"),
    }
    faults += _unequal(found, {"weight": torch.zeros_like(theirs["embed.weight"]), "state": value})
    with pytest.raises(deepspeed.ConfigError, match="optim_state_key='momentum' is not there; give one of"):
        safe_set_full_optimizer_state(bias, value, "momentum")
    with pytest.raises(deepspeed.ConfigError, match="is not a parameter of an engine"):
        safe_get_full_optimizer_state(theirs["head.bias"], "exp_avg")
    pair.close()
    return faults


@EACH_STAGE
def test_safe_functions(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_read_safely, stage) == [[], []]
    assert ranks(2).run(_written_safely, stage) == [[], []]
