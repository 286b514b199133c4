"""Compiled forwards and frames that Dynamo skips, while somebody holds pages open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import retrograde.deepspeed as deepspeed
from retrograde.deepspeed.zero import GatheredParameters
from tests.compile.driver import fresh
from tests.compile.models import BrokenMlp, LoopBlock, Straight, WhileBlock
from tests.deepspeed.pair import config
from tests.harness import Ranks
from tests.reference import play, same

Engine = deepspeed.DeepSpeedEngine

MODELS: dict[str, Callable[[], nn.Module]] = {
    "compiled": Straight,
    "skipped in a for": partial(BrokenMlp, LoopBlock),
    "skipped in a while": partial(BrokenMlp, WhileBlock),
}


def _build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]()


def _loss(model: Any, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def _open(engine: Engine) -> set[str]:
    return {unit.name for unit in engine.sharded.units if unit.page.storage is not None}


def _by_parameters(engine: Engine) -> Any:
    return GatheredParameters(engine.module.blocks[1].parameters())


def _by_engine(engine: Engine) -> Any:
    return engine.sharded.full_params(engine.module.blocks[1])


HOLDS = {"GatheredParameters": _by_parameters, "full_params": _by_engine}


def _held_open(rank: int, world: int, name: str, deepcompile: bool) -> list[str]:
    """Over forward and backward in the first step, over the forward alone in the second: then backward reads again
    what a skipped frame needs."""
    faults: list[str] = []
    for hold, holding in HOLDS.items():
        fresh()
        asked = config(3, compile={"deepcompile": deepcompile})
        engine, *_ = deepspeed.initialize(model=_build(name), config=asked)
        engine.compile(backend="aot_eager")
        for step in range(2):
            with holding(engine):
                loss = _loss(engine, rank, step)
                if step == 0:
                    engine.backward(loss)
                faults += [f"{hold}: not open in step {step}"] * ("blocks.1" not in _open(engine))
            reads = engine.sharded.ledger.count("gather", "blocks.1")
            if step == 1:
                faults += [f"{hold}: open after the context"] * ("blocks.1" in _open(engine))
                engine.backward(loss)
                faults += [f"{hold}: not read again"] * (engine.sharded.ledger.count("gather", "blocks.1") != reads + 1)
            faults += [f"{hold}: left open {unit}" for unit in _open(engine)]
        faults += [f"{hold}: {each}" for each in _wrong(engine, name, world)]
        skipped = counters["frames"]["total"] > counters["frames"]["ok"]
        faults += [f"{hold}: no frame was skipped"] * (not skipped and "skipped" in name)
        faults += [f"{hold}: nothing was compiled"] * (counters["stats"]["unique_graphs"] == 0)
        dist.barrier()
    return faults


def _wrong(engine: Engine, name: str, world: int) -> list[str]:
    """Gradients of two backwards that differ from plain torch's."""
    plain = _build(name)
    play(plain, world, lambda model, rank: [_loss(model, rank, step).backward() for step in range(2)], 3)
    grads = engine.sharded.full_grads()
    return [n for n, p in plain.named_parameters() if not same(grads[n], p.grad)]


@pytest.mark.parametrize(
    ("name", "deepcompile"), (("compiled", True), ("skipped in a for", False), ("skipped in a while", True))
)
def test_a_page_that_is_held_open(ranks: Ranks, name: str, deepcompile: bool) -> None:
    assert ranks(2).run(_held_open, name, deepcompile) == [[], []]


def _small_ones_stay(rank: int, world: int, name: str) -> tuple[list[str], list[int]]:
    """How often pages are read in a first and in a second forward and backward with the same weights."""
    fresh()
    zero = {"stage3_param_persistence_threshold": 10**6}
    asked = config(3, zero_optimization=zero, compile={"deepcompile": True})
    engine, *_ = deepspeed.initialize(model=_build(name), config=asked)
    engine.compile(backend="aot_eager")
    reads = []
    for step in range(2):
        engine.sharded.ledger.clear()
        engine.backward(_loss(engine, rank, step))
        reads.append(engine.sharded.ledger.count("gather"))
    wrong = _wrong(engine, name, world)
    dist.barrier()
    return wrong, reads


@pytest.mark.parametrize("name", ("compiled", "skipped in a while"))
def test_small_parameters_that_stay_resident(ranks: Ranks, name: str) -> None:
    units = 4  # three blocks and the rest
    for wrong, reads in ranks(2).run(_small_ones_stay, name):
        assert wrong == [] and reads == [units, 0]
