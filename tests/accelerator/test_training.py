"""Training on the device gives the CPU's numbers, bit for bit, in every order, and without a race."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.ranks import EACH_MODE, alone
from tests.accelerator.training import build, train
from tests.harness import Ranks
from tests.patterns.models import SPECS

CPU = torch.device("cpu")
ADAMW: tuple[dict[str, Any], ...] = ({"foreach": False}, {"foreach": True}, {"fused": True})


def _equal(name: str, mode: str, seed: int, **options: Any) -> None:
    want = train(name, build(name, CPU), CPU, **options)
    where = device.of_rank(0)
    model = build(name, where)
    with device.use(mode, seed):
        got = train(name, model, where, **options)
    assert len(got) == len(want) > 0
    assert all(map(torch.equal, got, want))


@EACH_MODE
def test_gpt(late_ranks: Ranks, mode: str, seed: int) -> None:
    for options in ADAMW:
        late_ranks(1).run(alone, _equal, "gpt", mode, seed, **options)


@pytest.mark.parametrize("name", sorted(SPECS.keys() - {"gan"}))  # which is two models
def test_models_of_the_matrix(late_ranks: Ranks, name: str) -> None:
    for mode, seed in (("lazy", 0), ("random", 1)):
        late_ranks(1).run(alone, _equal, name, mode, seed)


def _no_waiting() -> tuple[dict[str, int], dict[str, int]]:
    where = device.of_rank(0)
    model = build("gpt", where)
    spec = SPECS["gpt"]
    x, y = (t.pin_memory() for t in spec.batch(0, 0))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with device.use("lazy"):
        loss = spec.loss(model(x.to(where, non_blocking=True)), y.to(where, non_blocking=True))
        loss.backward()
        optimizer.step()
        before = device.synchronisations()
        loss.item()
        return before, device.synchronisations()


def test_the_host_waits_for_nothing_but_a_value(late_ranks: Ranks) -> None:
    assert late_ranks(1).run(alone, _no_waiting) == [({}, {"item": 1})]
