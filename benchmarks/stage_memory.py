"""What one middle pipeline stage holds between forward, I and W: torch.distributed.pipelining beside ours.

Two transformer blocks, one microbatch, one process. KiB beyond parameters, their gradients and receive buffers.
Run with `python -m benchmarks.stage_memory`.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.live import Live
from benchmarks.stage_blocks import BATCH, TOKENS, WIDTH, stage
from retrograde.pipeline.split import SplitBackward

CASES = {"plain": ("plain", None), "SDPA": ("sdpa", None), "checkpointed": ("plain", "other")}


@dataclass
class Figures:
    """Bytes. `unread` is what is alive after I and W never reads; `peak` is over I and W."""

    after_f: int = 0
    after_i: int = 0
    unread: int = 0
    peak: int = 0
    after_w: int = 0
    runs: list[int] = field(default_factory=list)


@dataclass
class Stage:
    """One microbatch of a stage, in the hands of somebody's split backward."""

    module: nn.Sequential
    x: Tensor
    grad: Tensor
    forward: Callable[[], None]
    inputs: Callable[[], None]
    weights: Callable[[], None]


def theirs(module: nn.Sequential, x: Tensor, grad: Tensor) -> Stage:
    held: dict[str, list] = {}

    def forward() -> None:
        held["outputs"] = [module(x)]

    def inputs() -> None:
        _, held["groups"] = stage_backward_input(held["outputs"], [grad], [x], iter(module.parameters()))
        held.pop("outputs")

    def weights() -> None:
        stage_backward_weight(iter(module.parameters()), held.pop("groups"))

    return Stage(module, x, grad, forward, inputs, weights)


def ours(module: nn.Sequential, x: Tensor, grad: Tensor) -> Stage:
    held: dict[str, list[Tensor]] = {}
    split = SplitBackward()

    def forward() -> None:
        with split.recording():
            held["outputs"] = [module(x)]

    def inputs() -> None:
        split.run_inputs(held.pop("outputs"), [grad])
        x.grad = None  # sent to the stage before

    return Stage(module, x, grad, forward, inputs, split.run_weights)


def measure(make: Callable[[nn.Sequential, Tensor, Tensor], Stage], kind: str, recompute: str | None) -> Figures:
    module = stage(kind, recompute)
    x = torch.randn(BATCH, TOKENS, WIDTH).requires_grad_()
    grad = torch.randn(BATCH, TOKENS, WIDTH)
    run = make(module, x, grad)
    figures = Figures()
    fixed = [*module.parameters(), x.detach(), grad]
    with Live(peak=True) as live:
        live.ignore(*fixed)
        run.forward()
        figures.after_f = settled(live, module)
        live.restart_peak()
        run.inputs()
        figures.after_i = settled(live, module)
        waiting = live.alive()
        live.read = set()
        run.weights()
        figures.unread = sum(nbytes for storage, nbytes in waiting.items() if storage not in live.read)
        figures.peak = live.peak
        figures.after_w = settled(live, module)
    figures.runs = [block.runs for block in module]
    return figures


def settled(live: Live, module: nn.Module) -> int:
    gc.collect()
    live.ignore(*(p.grad for p in module.parameters()))
    return live.bytes()


def table() -> str:
    lines = [
        "| stage | | after F | after I | of which W never reads | peak in I and W | after W | runs of a block |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (kind, recompute) in CASES.items():
        for who, make in (("torch", theirs), ("retrograde", ours)):
            f = measure(make, kind, recompute)
            kib = [f"{n / 1024:.0f}" for n in (f.after_f, f.after_i, f.unread, f.peak, f.after_w)]
            lines.append(f"| {name} | {who} | {' | '.join(kib)} | {f.runs[0]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
