"""The free-form backward matrix on the test device: the same rows, models and numbers as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accelerator import device
from tests.patterns.driver import Player
from tests.patterns.models import SPECS, Batch, Spec
from tests.patterns.rows import CASES
from tests.patterns.trace import Trace


def play_late(rank: int, world: int, case_id: str, stage: int, mode: str, seed: int, **options: Any) -> Trace:
    """A task for the pool. What a row makes without saying where is on the device too."""
    where = device.of_rank(rank)
    with mock.patch.dict(SPECS, {name: on_device(spec, where) for name, spec in SPECS.items()}):
        with device.use(mode, seed), torch.device(where):
            trace = Player(CASES[case_id], rank, world, stage, **options).play()
            dist.barrier()  # a rank that drops its model takes its shards along, and others may still be reading
            return _on_host(trace)


def on_device(spec: Spec, where: torch.device) -> Spec:
    return replace(spec, build=partial(_built, spec.build, where), make_batch=partial(_drawn, spec.make_batch, where))


def _built(build: Callable[[], nn.Module], where: torch.device) -> nn.Module:
    with torch.device("cpu"):
        model = build()
    return device.move(model, where)


def _drawn(make: Callable[[torch.Generator], Batch], where: torch.device, generator: torch.Generator) -> Batch:
    with torch.device("cpu"):
        batch = make(generator)
    return Batch(*(tensor.to(where) for tensor in batch))


def _on_host(trace: Trace) -> Trace:
    return Trace(
        [{name: _host(grad) for name, grad in grads.items()} for grads in trace.grads],
        {name: _host(value) for name, value in trace.state.items()},
        [(name, _host(value)) for name, value in trace.records],
        trace.leftovers,
    )


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
