"""What `python -m benchmarks.gpu` runs on each rank, section by section. A section returns lines of a report."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import retrograde as rg
from benchmarks import llama, stage_memory, window_rank
from benchmarks.contenders import fully_shard_blocks
from benchmarks.overhead_rank import PLAIN, SMOKE, SmallParameters, Training
from benchmarks.overhead_rank import Block as SmallBlock
from benchmarks.overhead_rank import Model as SmallModel
from benchmarks.stage_blocks import BATCH, TOKENS, WIDTH, stage

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    rows: tuple[str, ...]  # parts of names of rows of the matrix; none: all of them
    stages: tuple[int, ...]
    small: SmallParameters
    calls: int  # timed calls of each operation
    mlp: window_rank.Mlp
    shape: llama.Shape
    steps: int  # timed steps of the Llama shape
    recompute: bool


FULL = Sizes((), (1, 2, 3), SmallParameters(), 20, window_rank.Mlp(), llama.EIGHT_BILLION, 10, recompute=True)
TINY = Sizes(("1-plain-gpt", "6b-two_windows-mlp"), (3,), SMOKE, 2, window_rank.SMOKE, llama.TINY, 2, recompute=False)


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what its device can be asked."""

    rank: int
    world: int
    device: torch.device

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def restart_peak(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Bytes of the device's allocator; the host has none that could be asked."""
        return 0 if self.device.type == "cpu" else torch.accelerator.max_memory_allocated(self.device)

    def allocated(self) -> int:
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Of one call, on the slowest rank, when everything that it has issued is done."""
        run()
        self.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return self.most((time.perf_counter() - began) / calls)

    def most(self, value: float) -> float:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return float(max(found))


# ---- sections
def matrix(place: Place, sizes: Sizes) -> Iterator[str]:
    """Rows of the backward matrix beside plain torch on the same device: bit for bit with `exact=True`, and with the
    backend's sums, which are the default, as far as its order of adding up allows."""
    from tests.accelerator.matrix import on_device
    from tests.patterns.models import SPECS
    from tests.patterns.rows import CASES

    torch.use_deterministic_algorithms(True, warn_only=True)
    chosen = [name for name in CASES if not sizes.rows or any(part in name for part in sizes.rows)]
    specs = {name: on_device(spec, place.device) for name, spec in SPECS.items()}
    for exact in (True, False):
        right = 0
        sums = "in rank order" if exact else "by the backend"
        with mock.patch.dict(SPECS, specs), torch.device(place.device):
            for name, number in itertools.product(chosen, sizes.stages):
                wrong = _differences(place, name, number, exact)
                right += not place.most(bool(wrong))
                if wrong:
                    yield f"- {name}, stage {number}, sums {sums}: {wrong[0]}"
        yield f"sums {sums}: {right} of {len(chosen) * len(sizes.stages)} rows and stages are right"


def _differences(place: Place, name: str, stage: int, exact: bool) -> list[str]:
    """The differences between a row here and what plain torch makes of it."""
    from tests.patterns.backend_sums import differences_of_sums
    from tests.patterns.driver import Player
    from tests.patterns.oracle import Oracle
    from tests.patterns.rows import CASES

    case = CASES[name]
    want = Oracle(case, place.world, stage).play()[place.rank]
    got = Player(case, place.rank, place.world, stage, exact=exact, transport="collective").play()
    dist.barrier()  # a rank that drops its model takes its shards along
    return differences_of_sums(case, place.world, exact, got, want)


def overlap(place: Place, sizes: Sizes) -> Iterator[str]:
    """The same training with `overlap=False`: a missing wait on a real device may show as another number."""
    runs = [_small_losses(place, sizes, overlap=each) for each in (True, True, False)]
    yield f"a run is the same again: {torch.equal(runs[0], runs[1])}"
    yield f"and without overlap: {torch.equal(runs[0], runs[2])}"


def _small_losses(place: Place, sizes: Sizes, **options: Any) -> Tensor:
    torch.manual_seed(0)
    model = SmallModel(max(sizes.small.counts), sizes.small.rows, sizes.small.width).to(place.device)
    rg.shard(model, stage=3, units=(SmallBlock,), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(place.rank)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(sizes.small.batch, sizes.small.width).to(place.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    dist.barrier()
    return torch.stack(losses).cpu()


def pipelines(place: Place, sizes: Sizes) -> Iterator[str]:
    """Gradients of this rank's stages beside plain torch's."""
    for schedule in ("1f1b", "zb-h1"):
        try:
            yield _piped(schedule, place)
        except rg.PipelineError as error:
            yield f"{schedule}: refused: {error}"


def _piped(schedule: str, place: Place) -> str:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(place.device) for _ in range(2 * place.world)]
    x, y = (torch.randn(8, WIDTH).to(place.device) for _ in range(2))
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(nn.Sequential(*blocks)(part), target) / 4).backward()
    want = [param.grad for block in blocks for param in block.parameters()]
    for block in blocks:
        block.zero_grad()
    pipe = rg.Pipeline(blocks, schedule=schedule, microbatches=4, loss=F.mse_loss)
    place.restart_peak()
    pipe.step(x, target=y)
    got = [param.grad for block in blocks for param in block.parameters()]
    pairs = [(mine, grad) for mine, grad in zip(got, want, strict=True) if mine is not None and grad is not None]
    exact = bool(pairs) and all(torch.equal(mine, grad) for mine, grad in pairs)
    return f"{schedule}: gradients exact: {not place.most(not exact)}; peak {place.peak() / MIB:.1f} MiB"


def overhead(place: Place, sizes: Sizes) -> Iterator[str]:
    """Microseconds of what a loop does to many small parameters."""
    yield "| engine | parameters | " + " | ".join(_OPERATIONS) + " |"
    yield "|---|---:|" + "---:|" * len(_OPERATIONS)
    for engine in (PLAIN, "fsdp2", "retrograde-3"):
        for count in sizes.small.counts:
            torch.manual_seed(0)
            model = SmallModel(count, sizes.small.rows, sizes.small.width).to(place.device)
            if engine == "fsdp2":
                fully_shard_blocks(model, model.blocks, True, place.device.type)
            elif engine != PLAIN:
                rg.shard(model, stage=3, units=(SmallBlock,))
            training = Training(model, torch.randn(sizes.small.batch, sizes.small.width).to(place.device))
            found = training.operations()
            times = [place.seconds(found[name].run, sizes.calls) for name in _OPERATIONS]
            yield f"| {engine} | {count} | " + " | ".join(f"{1e6 * each:.0f}" for each in times) + " |"


_OPERATIONS = ("AdamW(fused=True).step", "AdamW(foreach=True).step", "clip_grad_norm_")


def zero_bubble(place: Place, sizes: Sizes) -> Iterator[str]:
    """What the allocator holds of one microbatch of a stage between F, I and W, beyond what was there before."""
    yield "| stage | | after F, KiB | after I | peak in I and W | after W |"
    yield "|---|---|---:|---:|---:|---:|"
    for name, (kind, recompute) in stage_memory.CASES.items():
        for who, make in (("torch", stage_memory.theirs), ("retrograde", stage_memory.ours)):
            cells = _allocated(make, kind, recompute, place)
            yield f"| {name} | {who} | " + " | ".join(f"{each / 1024:.0f}" for each in cells) + " |"


def _allocated(make: Callable[..., stage_memory.Stage], kind: str, recompute: str | None, place: Place) -> list[int]:
    gc.collect()  # what a case before this one has left
    module = stage(kind, recompute).to(place.device)
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    x = torch.randn(BATCH, TOKENS, WIDTH).to(place.device).requires_grad_()
    run = make(module, x, torch.randn(BATCH, TOKENS, WIDTH).to(place.device))
    before = place.allocated()
    cells = []
    for action in (run.forward, run.inputs, run.weights):
        if action is run.inputs:
            place.restart_peak()
        action()
        place.synchronize()
        gc.collect()
        cells.append(place.allocated() - before)
    cells.insert(2, place.peak() - before)
    return cells


def windows(place: Place, sizes: Sizes) -> Iterator[str]:
    """Four backwards a step, reduced each time or once."""
    yield "| stage | | ms | peak, MiB | reductions |"
    yield "|---:|---|---:|---:|---:|"
    for number in (2, 3):
        for manner in ("each", "coalesced", "no_sync"):
            torch.manual_seed(0)
            model = window_rank.Model(sizes.mlp).to(place.device, torch.bfloat16)
            engine = rg.shard(model, stage=number, units=(window_rank.Layer,))
            step = _window_step(engine, model, manner, torch.randn(sizes.mlp.rows, sizes.mlp.width), place)
            place.restart_peak()
            seconds = place.seconds(step, 3)
            reductions = engine.ledger.count("reduce") // 4
            yield f"| {number} | {manner} | {1e3 * seconds:.1f} | {place.peak() / MIB:.2f} | {reductions} |"
            dist.barrier()


def _window_step(engine: rg.Engine, model: nn.Module, manner: str, x: Tensor, place: Place) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = x.to(place.device, torch.bfloat16)
    windows: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "each": nullcontext,
        "coalesced": engine.coalesce,
        "no_sync": engine.no_sync,
    }

    inside = 3 if manner == "no_sync" else 4  # of four backwards: after no_sync the next one outside reduces them all

    def step() -> None:
        with windows[manner]():
            for _ in range(inside):
                model(x).backward()
        for _ in range(4 - inside):
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training(place: Place, sizes: Sizes) -> Iterator[str]:
    """The Llama shape: bf16, fp32 masters and sums, fused AdamW."""
    yield "| engine | tokens a second and device | peak, GiB | loss |"
    yield "|---|---:|---:|---:|"
    for engine in ("fsdp2", "retrograde-3", "retrograde-2"):
        try:
            yield _trained(engine, place, sizes)
        except torch.OutOfMemoryError:
            yield f"| {engine} | out of memory | | |"
        dist.barrier()


def _trained(engine: str, place: Place, sizes: Sizes) -> str:
    shape = sizes.shape
    torch.manual_seed(0)
    with torch.device("cpu" if place.device.type != "cuda" else place.device):
        model = llama.Llama(shape, sizes.recompute)
    model.to(place.device)
    if engine == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        rg.shard(model, stage=int(engine[-1]), units=(llama.Block,), precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    draw = torch.Generator().manual_seed(place.rank)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.context + 1), generator=draw).to(place.device)
    losses: list[Tensor] = []

    def step() -> None:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[:] = [loss.detach()]

    step()
    place.restart_peak()
    seconds = place.seconds(step, sizes.steps)
    rate = shape.batch * shape.context / seconds
    return f"| {engine} | {rate:,.0f} | {place.most(place.peak()) / 2**30:.2f} | {float(losses[0]):.4f} |"


SECTIONS: dict[str, Callable[[Place, Sizes], Iterator[str]]] = {
    "matrix": matrix,
    "overlap": overlap,
    "pipelines": pipelines,
    "overhead": overhead,
    "zero bubble": zero_bubble,
    "windows": windows,
    "training": training,
}


@contextmanager
def joined(rank: int, world: int, kind: str, store: str) -> Iterator[Place]:
    device = _device(rank, kind)
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        yield Place(rank, world, device)
    finally:
        dist.destroy_process_group()


def _device(rank: int, kind: str) -> torch.device:
    if kind == "late":
        from tests.accelerator import device

        device.load()
        return device.of_rank(rank)
    if kind == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(rank)
    return torch.device(kind, rank)


def run(rank: int, world: int, kind: str, section: str, sizes: Sizes, store: str, into: str) -> None:
    """One section on one rank. Rank 0 writes its lines as they come, so that what came before a failure is there."""
    with joined(rank, world, kind, store) as place, open(into if rank == 0 else "/dev/null", "a") as file:
        for line in SECTIONS[section](place, sizes):
            print(line, file=file, flush=True)
