"""`python -m benchmarks.compiled_memory`: graphs, pages and bytes of a compiled stage 3 step, beside an eager one.

Counts and bytes only, so it does not matter how busy the machine is. The table is in docs/design/compile.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._dynamo.utils import counters

import retrograde as rg
from benchmarks import gather_operator
from benchmarks.blocks import Block

WIDTH = 64
BLOCKS = 6
TOKENS = 128
WORLD = 2
STEPS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes this thread's allocations hold at once during `work`, beyond what was there before."""
    torch.autograd._enable_profiler_legacy(
        torch.autograd.ProfilerConfig(
            torch.autograd.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
        )
    )
    work()
    held = 0
    most = 0
    for thread in torch.autograd._disable_profiler_legacy():
        for event in thread:
            if event.kind() == "memory_alloc":
                held += event.cpu_memory_usage()
                most = max(most, held)
    return most


def _peak_of_a_step(model: nn.Module, backend: str | None, forget: Callable[[], object]) -> int:
    """The last of a few steps; `forget` is called before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = model if backend is None else torch.compile(model, backend=backend)
    x = torch.randn(TOKENS, WIDTH)

    def step() -> None:
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    forget()
    dist.barrier()
    peak = peak_bytes(step)
    dist.barrier()
    return peak


def _fresh_model() -> Model:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    return Model()


def _measure(backend: str | None, whole: bool = False, prefetch: bool = True) -> list[int]:
    """`whole`: the model is one unit, so it is one graph with all its full parameters as inputs."""
    model = _fresh_model()
    engine = rg.shard(model, 3, units=(lambda module: False) if whole else "auto", prefetch=prefetch)
    peak = _peak_of_a_step(model, backend, engine.ledger.clear)
    return [counters["stats"]["unique_graphs"], engine.ledger.peak, engine.ledger.count("gather"), peak]


def _measure_operator(backend: str, again: bool) -> list[int]:
    """Each block gathers itself by an operator within one graph; `again`: in backward once more."""
    model = _fresh_model()
    one_graph = gather_operator.Whole([model.first, *model.blocks, model.last], again)
    pages = gather_operator.PAGES
    peak = _peak_of_a_step(one_graph, backend, pages.forget)
    return [counters["stats"]["unique_graphs"], pages.most, pages.gathers, peak]


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    rows: dict[str, list[int]] = {}
    for backend in (None, "aot_eager", "inductor"):
        rows[f"regions, {backend}" if backend else "eager"] = _measure(backend)
    rows["regions without prefetch, inductor"] = _measure("inductor", prefetch=False)
    for backend in ("aot_eager", "inductor"):
        rows[f"one graph, full tensors as inputs, {backend}"] = _measure(backend, whole=True)
    for again in (False, True):
        for backend in ("aot_eager", "inductor"):
            name = "gathered again" if again else "saved"
            rows[f"one graph, gather as an operator, {name}, {backend}"] = _measure_operator(backend, again)
    if rank == 0:
        print("| | graphs | page bytes at once | gathers per step | peak of a step, bytes |\n|---|---|---|---|---|")
        for name, row in rows.items():
            print(f"| {name} | " + " | ".join(f"{value:,}" for value in row) + " |")
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (os.path.join(folder, "store"),), WORLD)


if __name__ == "__main__":
    main()
