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
        engine = rg.shard(model, stage=stage, timeout=20.0, **options)
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
    """What is saved behind its inner module goes to the CPU, by torch's hooks inside ours."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        with torch.autograd.graph.save_on_cpu(pin_memory=x.device.type != "cpu"):
            return torch.tanh(self.norm(inner))


class Saved(NamedTuple):
    """`packed`: what torch's hooks outside ours were given, in elements."""

    grads: list[Tensor]
    packed: list[int]


def with_inside(where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = SPEC.build()
    model.blocks[1] = Inside(model.blocks[1], model.head.in_features)  # type: ignore[index, operator, union-attr, arg-type]
    return model if where.type == "cpu" else device.move(model, where)


def backwards_from_cpu(model: nn.Module, where: torch.device, rank: int) -> list[int]:
    """Two, of which all that is saved goes to the CPU. Returns its elements.

    Torch's `save_on_cpu` makes transposed tensors contiguous, with which a product differs in its last bits."""
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(tensor)

    def unpack(kept: Tensor) -> Tensor:
        return torch.empty_strided(kept.size(), kept.stride(), dtype=kept.dtype, device=where).copy_(kept)

    for step in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = loss_of(model, where, rank, step)
        loss.backward()
    return packed


def offloaded_activations(rank: int, world: int, stage: int, on_device: bool, offload: str | None) -> Saved:
    """Hooks around the model, and inside one of its blocks."""
    where = device.of_rank(rank) if on_device else CPU
    model = with_inside(where)
    rg.shard(model, stage=stage, timeout=20.0, offload=offload, exact=True)
    with device.use("lazy") if on_device else contextlib.nullcontext():
        packed = backwards_from_cpu(model, where, rank)
        grads = [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]  # type: ignore[union-attr]
        dist.barrier()
    return Saved(grads, packed)


# ---- whoever looks
def seen_by_hooks(rank: int, world: int, stage: int, mode: str, seed: int) -> list[list[Tensor]]:
    """Gradients as hooks, `torch.autograd.grad` and a look at `p.grad` in the middle show them, each beside `.grad`.

    Hooks that meet are on one parameter: with leaves on the host autograd runs those of several in no certain order."""
    where = device.of_rank(rank)
    seen: list[list[Tensor]] = []
    with device.use(mode, seed):
        model = build(where)
        first = next(model.parameters())
        before: list[Tensor] = []
        first.register_hook(lambda grad: before.append(grad.full_tensor().clone()))  # type: ignore[attr-defined]
        rg.shard(model, stage=stage, timeout=20.0, exact=True, offload="optimizer")
        after: list[Tensor] = []
        first.register_post_accumulate_grad_hook(
            lambda leaf: after.append(leaf.grad.full_tensor().clone())  # type: ignore[union-attr]
        )
        loss_of(model, where, rank, 0).backward()
        seen.append([before[0], first.grad.full_tensor()])  # type: ignore[union-attr]
        seen.append([after[0], first.grad.full_tensor()])  # type: ignore[union-attr]
        (captured,) = torch.autograd.grad(loss_of(model, where, rank, 0), [first])
        seen.append([captured.full_tensor(), first.grad.full_tensor()])  # type: ignore[union-attr]
        dist.barrier()
    return [[tensor.cpu() for tensor in pair] for pair in seen]


# ---- checkpoints
def checkpointed(rank: int, world: int, stage: int, folder: str, offload: str) -> list[str]:
    """Saved with offload and loaded into a model without, and the other way round; then both go on."""
    where = device.of_rank(rank)
    with device.use("lazy"):
        models = [build(where) for _ in range(2)]
        for model, given in zip(models, (offload, None), strict=True):
            rg.shard(model, stage=stage, timeout=20.0, offload=given)
        optimizers = [adamw(model) for model in models]

        def step(which: int, number: int) -> None:
            loss_of(models[which], where, rank, number).backward()
            optimizers[which].step()
            optimizers[which].zero_grad()

        step(0, 0)
        rg.save(f"{folder}/offloaded", models[0], optimizers[0])
        rg.load(f"{folder}/offloaded", models[1], optimizers[1])
        step(0, 1)
        step(1, 1)
        rg.save(f"{folder}/plain", models[1], optimizers[1])
        rg.load(f"{folder}/plain", models[0], optimizers[0])
        waits = []
        for number in (2, 3):
            device_counters(where)
            step(0, number)
            waits.append(device_counters(where))
            step(1, number)
        ours, theirs = (model.state_dict() for model in models)
        wrong = [name for name in ours if not torch.equal(ours[name].cpu(), theirs[name].cpu())]
        dist.barrier()
    return wrong + [f"waited {each}" for each in waits if each != {"Event.synchronize": 1}]
