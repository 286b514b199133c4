"""Models that are trained with offload on the test device, and in the same way on the CPU: tasks for pools of ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.accelerator import device
from tests.patterns.models import SPECS

CPU = torch.device("cpu")
STEPS = 3
GRAIN = 512  # the device's memory comes in multiples of it
SPEC = SPECS["gpt"]


class Trained(NamedTuple):
    """`waits`: how often the host waited in each step, by cause."""

    values: list[Tensor]
    waits: list[dict[str, int]]


def build(where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = SPEC.build()
    return model if where.type == "cpu" else device.move(model, where)


def sent(x: Tensor, where: torch.device) -> Tensor:
    """Without waiting: from pinned memory."""
    return x if where.type == "cpu" else x.pin_memory().to(where, non_blocking=True)


def loss_of(model: nn.Module, where: torch.device, rank: int, step: int) -> Tensor:
    x, y = (sent(tensor, where) for tensor in SPEC.batch(rank, step))
    return SPEC.loss(model(x), y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# ---- training
class Way(NamedTuple):
    """How often and in which window a step goes backward, and whether gradients are clipped."""

    backwards: int = 1
    window: str = "none"
    clip: float = 0.25

    def around(self, engine: rg.Engine) -> contextlib.AbstractContextManager[None]:
        windows: dict[str, Callable[[], Any]] = {"coalesce": engine.coalesce, "no_sync": engine.no_sync}
        return windows.get(self.window, contextlib.nullcontext)()


def train(model: nn.Module, engine: rg.Engine, where: torch.device, rank: int, way: Way) -> Trained:
    optimizer = adamw(model)
    values: list[Tensor] = []
    waits: list[dict[str, int]] = []
    for step in range(STEPS):
        device_counters(where)
        with way.around(engine):
            for index in range(way.backwards):
                loss = loss_of(model, where, rank, 100 * step + index) / way.backwards
                loss.backward()
                values.append(loss.detach())
        if way.clip:
            values.append(nn.utils.clip_grad_norm_(model.parameters(), way.clip))
        optimizer.step()
        optimizer.zero_grad()
        waits.append(device_counters(where))
    values += [parameter.full_tensor().detach() for parameter in model.parameters()]
    return Trained([value.cpu() for value in values], waits)


def device_counters(where: torch.device) -> dict[str, int]:
    """What made the host wait since the last call."""
    if where.type == "cpu":
        return {}
    waits = device.synchronisations()
    device.reset_counters()
    return waits


def train_late(rank: int, world: int, stage: int, mode: str, seed: int, way: Way, **options: Any) -> Trained:
    where = device.of_rank(rank)
    with device.use(mode, seed):
        model = build(where)
        engine = rg.shard(model, stage=stage, timeout=20.0, exact=True, **options)
        trained = train(model, engine, where, rank, way)
        dist.barrier()
    return trained


def train_on_cpu(rank: int, world: int, stage: int, way: Way, **options: Any) -> Trained:
    model = build(CPU)
    trained = train(model, rg.shard(model, stage=stage, timeout=20.0, **options), CPU, rank, way)
    dist.barrier()
    return trained


# ---- what is where
def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN


class Measured(NamedTuple):
    """Bytes on the device between two steps, with optimizer state, and what they should be; where tensors are."""

    found: int
    stubs: int  # memory of one element, for each unit
    pages: int
    sources: int
    placed: set[str]  # of leaves, gradients and optimizer state
    said: str


def measured(rank: int, world: int, stage: int, offload: str, precision: str | None) -> Measured:
    where = device.of_rank(rank)
    with device.use("lazy"):
        before = torch.accelerator.memory_allocated()
        model = build(where)
        engine = rg.shard(model, stage=stage, timeout=20.0, offload=offload, precision=precision)
        optimizer = adamw(model)
        placed: set[str] = set()
        for step in range(2):
            loss_of(model, where, rank, step).backward()
            placed |= {p.grad.device.type for p in model.parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        placed |= {each.device.type for each in (*model.parameters(), *states)}
        engine.pages.trim()
        gc.collect()
        torch.accelerator.synchronize()
        found = torch.accelerator.memory_allocated() - before
        layouts = [unit.layout for unit in engine.units]
        said = engine.explain().splitlines()[-1]
        dist.barrier()
    return Measured(
        found,
        2 * GRAIN * len(layouts),
        sum(_rounded(layout.page_bytes) for layout in layouts),
        sum(_rounded(layout.shard_bytes) for layout in layouts),
        placed,
        said,
    )


# ---- activations
class Inside(nn.Module):
    """Its own activations go to the CPU, by torch's hooks inside ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(self.inner(x)) * self.weight


def offloaded_activations(
    rank: int, world: int, stage: int, where: torch.device | None, offload: str | None
) -> tuple[list[Tensor], int]:
    """Around the model and inside one of its blocks. Returns gradients, and bytes of the device between forward and
    backward beyond those before: no page, no activation."""
    if where is None:
        where = CPU
    model = build(where)
    model.blocks[1] = Inside(model.blocks[1]).to(where)  # type: ignore[index, operator]
    engine = rg.shard(model, stage=stage, timeout=20.0, offload=offload, **({} if where == CPU else {"exact": True}))
    held = 0
    for step in range(2):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model, where, rank, step)
        held = sum(entry.kind == "gather" for entry in engine.ledger.entries)
        loss.backward()
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    dist.barrier()
    return [grad.cpu() for grad in grads], held
