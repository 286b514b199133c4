"""The bubble of real pipelines whose actions take a known time: ours, and torch.distributed.pipelining.

Four ranks, eight microbatches; F, I and W of a rank's share of the model each sleep for the same time, so that the
cores of the machine do not matter. Run with `python -m benchmarks.bubble`; figures are medians over rounds, in each of
which every contender does one step, with the least and the largest.
"""

import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import retrograde as rg
from retrograde.pipeline import generate, simulate
from retrograde.pipeline.stage import Stage

RANKS = 4
MICROBATCHES = 8
ROUNDS = 5
PAUSE = 0.15  # seconds for F, I and W each, over a rank's whole share
WIDTH = 8


class Clock:
    """When this rank's first action of a step began and its last ended."""

    def __init__(self) -> None:
        self.first = 0.0
        self.last = 0.0

    def pause(self, seconds: float) -> None:
        if not self.first:
            self.first = time.monotonic()
        time.sleep(seconds)
        self.last = time.monotonic()


class PauseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock = clock
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.pause(ctx.seconds)
        return grad, None, None


class Sleeper(nn.Module):
    """A linear layer whose forward, input gradient and weight gradient take `seconds` each.

    Where W sleeps depends on whose W it is: torch's walks the graph to the weight; ours is a call of the stage.
    """

    def __init__(self, clock: Clock, seconds: float, ours: bool) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds
        self.ours = ours
        self.shift = nn.Parameter(torch.zeros(WIDTH))  # so that the first stage has an input gradient too
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.pause(self.seconds)
        x = PauseBackward.apply(x + self.shift, self.clock, self.seconds)
        weight = self.weight if self.ours else PauseBackward.apply(self.weight, self.clock, self.seconds)
        return torch.tanh(F.linear(x, weight))


@dataclass(frozen=True)
class Contender:
    schedule: str  # our name of it
    chunks: int
    torchs: Any = None  # torch's class, if torch runs it


CONTENDERS = (
    Contender("1f1b", 1),
    Contender("1f1b", 1, Schedule1F1B),
    Contender("zb-h1", 1),
    Contender("zb-h1", 1, ScheduleInterleavedZeroBubble),
    Contender("zb-v", 2),
    Contender("zb-v", 2, ScheduleZBVZeroBubble),
)


@dataclass
class Measured:
    """Idle time as a share of the work, by round: until a rank's last action, and until the last rank's last."""

    name: str
    engine: str
    bubbles: list[float]
    steps: list[float]
    theory: tuple[float, float]  # both, with actions of equal length and transfers that take no time


def pause_weights(stage: Stage, clock: Clock, seconds: float) -> None:
    """W, and the W in B, take their time."""

    def slow(work: Any) -> Any:
        def run(*args: Any) -> Any:
            result = work(*args)
            clock.pause(seconds)
            return result

        return run

    stage.backward_weights = slow(stage.backward_weights)
    stage.backward = slow(stage.backward)


def stepper(contender: Contender, clock: Clock, rank: int) -> Callable[[], object]:
    """What does one step of a contender on this rank."""
    if contender.torchs is None:
        return our_stepper(contender, clock)
    return torchs_stepper(contender, clock, rank)


def our_stepper(contender: Contender, clock: Clock) -> Callable[[], object]:
    seconds = PAUSE / contender.chunks
    x = torch.randn(MICROBATCHES * 2, WIDTH)
    blocks = [Sleeper(clock, seconds, True) for _ in range(RANKS * contender.chunks)]
    pipe = rg.Pipeline(blocks, schedule=contender.schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    for stage in pipe.stages.values():
        pause_weights(stage, clock, seconds)
    return lambda: pipe.step(x, target=x)


def torchs_stepper(contender: Contender, clock: Clock, rank: int) -> Callable[[], object]:
    seconds = PAUSE / contender.chunks
    x = torch.randn(MICROBATCHES * 2, WIDTH)
    last = RANKS * contender.chunks - 1
    v_shape = contender.torchs is ScheduleZBVZeroBubble
    numbers = [rank, last - rank] if v_shape else list(range(rank, last + 1, RANKS))
    stages = [
        PipelineStage(Sleeper(clock, seconds, False), n, last + 1, torch.device("cpu"), input_args=(x[:2],))
        for n in numbers
    ]
    one_stage = issubclass(contender.torchs, PipelineScheduleSingle)
    schedule = contender.torchs(stages[0] if one_stage else stages, MICROBATCHES, loss_fn=F.mse_loss)
    args = (x,) if 0 in numbers else ()
    target = {"target": x} if last in numbers else {}
    return lambda: schedule.step(*args, **target)


def run_rank(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    torch.manual_seed(0)
    clock = Clock()
    steppers = {contender: stepper(contender, clock, rank) for contender in CONTENDERS}
    for number in range(ROUNDS + 1):
        for contender, step in steppers.items():
            dist.barrier()
            clock.first = 0.0
            step()
            results.put((contender, number, clock.first, clock.last))
    dist.barrier()
    dist.destroy_process_group()


def measured() -> list[Measured]:
    """Of every contender, from a run of four ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = mp.get_context("spawn")
    results = context.Queue()
    found: dict[tuple[Contender, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(run_rank, args=(folder, results), nprocs=RANKS, join=False)
        for _ in range(len(CONTENDERS) * (ROUNDS + 1) * RANKS):
            contender, number, first, last = results.get(timeout=180)
            found.setdefault((contender, number), []).append((first, last))
        while not ranks.join(timeout=60):
            pass
    # The first round learns layouts.
    return [summary(each, [found[each, number] for number in range(1, ROUNDS + 1)]) for each in CONTENDERS]


def summary(contender: Contender, spans: list[list[tuple[float, float]]]) -> Measured:
    """`spans` are the beginning and the end of each rank's work, by round."""
    work = 3 * PAUSE * MICROBATCHES
    timeline = simulate(generate(contender.schedule, RANKS, MICROBATCHES))
    return Measured(
        contender.schedule,
        "retrograde" if contender.torchs is None else "torch",
        [max(end - start for start, end in ranks) / work - 1 for ranks in spans],
        [(max(end for _, end in ranks) - min(start for start, _ in ranks)) / work - 1 for ranks in spans],
        (timeline.bubble, timeline.step_bubble),
    )


def table(found: list[Measured]) -> str:
    lines = ["| schedule | | bubble | in theory | a single step | in theory |", "|---|---|---|---|---|---|"]
    for each in found:
        bubble, step = (f"{share:.1%}" for share in each.theory)
        cells = (each.name, each.engine, shares(each.bubbles), bubble, shares(each.steps), step)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shares(found: list[float]) -> str:
    return f"{statistics.median(found):.1%} ({min(found):.1%} to {max(found):.1%})"


if __name__ == "__main__":
    print(table(measured()))
