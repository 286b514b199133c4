"""`overlap=False`: the same numbers, bit for bit, with everything on one stream."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import retrograde as rg
from tests.accelerator import device
from tests.accelerator.training import build, train
from tests.harness import Ranks
from tests.patterns.models import SPECS
from tests.stages import EACH_STAGE

WORLD = 2
EACH_TRANSPORT = pytest.mark.parametrize("transport", ("collective", "one-sided"))


def _final(rank: int, stage: int, mode: str, backend: str | None, **options: Any) -> list[Tensor]:
    """Losses, norms and final weights. torch cannot trace attention on a device that it does not know."""
    where = device.of_rank(rank)
    name = "gpt" if backend is None else "mlp"
    model = build(name, where)
    rg.shard(model, stage=stage, timeout=20.0, **options)
    if backend is not None:
        torch._dynamo.reset()
        rg.compile(model, backend=backend)
    with device.use(mode):
        found = train(name, model, where, rank)
    dist.barrier()
    return found


def _alike(rank: int, world: int, stage: int, mode: str, backend: str | None, **options: Any) -> tuple[bool, bool]:
    """Is a run as the same one again, and as one without overlap?"""
    first, again = (_final(rank, stage, mode, backend, **options) for _ in range(2))
    alone = _final(rank, stage, mode, backend, overlap=False, **options)
    assert len(first) == len(again) == len(alone) > 0
    assert all(bool(value.isfinite().all()) for value in first)
    return all(map(torch.equal, first, again)), all(map(torch.equal, first, alone))


@EACH_STAGE
@EACH_TRANSPORT
def test_the_same_numbers(late_ranks: Ranks, stage: int, transport: str) -> None:
    mode = {1: "lazy", 2: "sides", 3: "lazy"}[stage]
    assert late_ranks(WORLD).run(_alike, stage, mode, None, transport=transport) == [(True, True)] * WORLD


def test_the_same_numbers_in_the_backends_order(late_ranks: Ranks) -> None:
    assert late_ranks(WORLD).run(_alike, 3, "lazy", None, exact=False) == [(True, True)] * WORLD


def test_the_same_numbers_compiled(late_ranks: Ranks) -> None:
    assert late_ranks(WORLD).run(_alike, 3, "lazy", "aot_eager", timeout=120.0) == [(True, True)] * WORLD


def _streams(rank: int, world: int, overlap: bool, side: bool) -> int:
    """On how many streams a step is, the process group's apart."""
    where = device.of_rank(rank)
    model = build("gpt", where)
    spec = SPECS["gpt"]
    x, y = (tensor.to(where) for tensor in spec.batch(rank, 0))
    with torch.Stream(where) if side else contextlib.nullcontext():
        rg.shard(model, stage=3, timeout=20.0, overlap=overlap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.accelerator.synchronize(where)
        with device.use("lazy"):
            spec.loss(model(x), y).backward()
            optimizer.step()
            used = device.streams()
    dist.barrier()
    return len(used)


@pytest.mark.parametrize("side", (False, True))
def test_everything_is_on_one_stream(late_ranks: Ranks, side: bool) -> None:
    assert late_ranks(WORLD).run(_streams, False, side) == [1] * WORLD
    # The user's, and one that divides sums; one that fetches has nothing to do but to wait.
    assert late_ranks(WORLD).run(_streams, True, side) == [2] * WORLD
