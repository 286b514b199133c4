"""DeepSpeed's documented training loop, with the import changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.deepspeed.pair import Pair, config
from tests.harness import Ranks
from tests.multiproc.twin import sgd
from tests.small import batch
from tests.stages import EACH_STAGE

STEPS = 3


def _micro_batches(pair: Pair, step: int) -> list[int]:
    return [pair.divisor * step + part for part in range(pair.divisor)]


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def _loop(rank: int, world: int, stage: int, accumulation: int, more: dict[str, Any]) -> dict[str, Any]:
    pair = Pair(rank, world, config(stage, accumulation, **more), optimize=_adamw if "optimizer" in more else sgd)
    engine = pair.engine
    norms = []
    for step in range(STEPS):
        for part in _micro_batches(pair, step):
            loss = engine(batch(rank, part))
            engine.backward(loss)
            engine.step()

        def program(model: nn.Module, rank: int, step: int = step) -> None:
            for part in _micro_batches(pair, step):
                (model(batch(rank, part)) / accumulation).backward()

        pair.plain_play(program)
        norms.append((engine.get_global_grad_norm(), float(pair.plain_step(engine.gradient_clipping()))))
    seen = {
        "wrong": pair.wrong_weights(),
        "norms": norms,
        "steps": (engine.global_steps, engine.micro_steps, engine.global_samples),
    }
    pair.close()
    return seen


@EACH_STAGE
@pytest.mark.parametrize("more", ({}, ADAMW), ids=("SGD", "AdamW"))
def test_weights_are_plain_torchs(ranks: Ranks, stage: int, more: dict[str, Any]) -> None:
    for seen in ranks(2).run(_loop, stage, 4, more):
        assert seen["wrong"] == []
        assert seen["steps"] == (STEPS, 4 * STEPS, 2 * 2 * 4 * STEPS)
