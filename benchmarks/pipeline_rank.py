"""One rank of the pipeline benchmark: some stages of a GPT, run by retrograde or by torch.distributed.pipelining.

Both get the same modules, cut the same way, and the same schedule. What is counted as memory of a step: every tensor
storage but those of parameters, their gradients and receive buffers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from benchmarks import meters
from benchmarks.live import Live
from benchmarks.model import Block, Workload
from benchmarks.protocol import Seat
from benchmarks.worker import Handlers, Member, join_ranks
from retrograde.pipeline import generate
from retrograde.pipeline.payload import Payload

TORCHS = {
    "1f1b": torchs.Schedule1F1B,
    "zb-h1": torchs.ScheduleInterleavedZeroBubble,
    "zb-v": torchs.ScheduleZBVZeroBubble,
}


class Engine(StrEnum):
    OURS = "retrograde"
    TORCH = "torch"


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same for both engines."""

    schedule: str
    precision: str  # "fp32" or "bf16", of parameters and activations
    checkpointed: bool  # every block
    pending: str | None = None  # retrograde's limit on what waits between I and W; torch has none

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]


@dataclass(frozen=True)
class Work:
    case: Case
    model: Workload

    @property
    def microbatches(self) -> int:
        """Of one sequence each."""
        return self.model.batch

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in stage_module(self, 0, 1).parameters())


FULL = Workload(layers=16, width=768, heads=12, vocab=4096, context=128, batch=8)
SMOKE = Workload(layers=8, width=32, heads=2, vocab=32, context=8, batch=8)


@dataclass(frozen=True)
class Build:
    """Make the stages of a case, and do a first step."""

    work: Work


@dataclass(frozen=True)
class Time:
    """One step."""


@dataclass(frozen=True)
class Look:
    """One step, with every storage counted after every operation."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    cpu_seconds: float  # of all threads of the rank
    resident: int  # the most bytes of the process in the step, beyond those before it
    gradient_norm: float  # of this rank's stages: both engines must have trained the same


@dataclass(frozen=True)
class Seen:
    """Bytes of tensors beyond parameters, gradients and receive buffers."""

    peak: int
    after: int  # when the step is over


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(work.vocab, work.width)
        self.positions = nn.Embedding(work.context, work.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


def stage_module(work: Work, number: int, stages: int) -> nn.Sequential:
    """The blocks are shared out evenly; the first stage has the embedding too, the last the head."""
    torch.manual_seed(number)
    model = work.model
    kind = CheckpointedBlock if work.case.checkpointed else Block
    parts: list[nn.Module] = [Embedding(model)] if number == 0 else []
    parts += [kind(model.width, model.heads) for _ in range(model.layers // stages)]
    if number == stages - 1:
        parts += [nn.LayerNorm(model.width), nn.Linear(model.width, model.vocab, bias=False)]
    return nn.Sequential(*parts).to(work.case.dtype)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    targets: Tensor

    @staticmethod
    def of(work: Work) -> Batch:
        draw = torch.Generator().manual_seed(0)
        drawn = torch.randint(work.model.vocab, (work.microbatches, work.model.context + 1), generator=draw)
        return Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


class Ours:
    def __init__(self, work: Work, modules: dict[int, nn.Sequential], batch: Batch) -> None:
        schedule = work.case.schedule
        self._batch = batch
        self._pipe = rg.Pipeline.from_stage_modules(
            modules, schedule=schedule, microbatches=work.microbatches, loss=loss, pending=work.case.pending
        )

    def step(self) -> None:
        self._pipe.step(self._batch.tokens, target=self._batch.targets)

    def leave_out_received(self, live: Live) -> None:
        """Tensors are received in memory of their own when they come."""
        transport = self._pipe._transport
        receive = transport.receive

        def received(peer: int, address: Any) -> Callable[[], Any]:
            incoming = receive(peer, address)

            def content() -> Any:
                found = incoming()
                live.ignore(*(found.tensors if isinstance(found, Payload) else found))
                return found

            return content

        transport.receive = received  # type: ignore[method-assign]

    def count_received_again(self) -> None:
        del self._pipe._transport.receive  # type: ignore[attr-defined]


class Torchs:
    def __init__(self, work: Work, modules: dict[int, nn.Sequential], batch: Batch, stages: int) -> None:
        device = torch.device("cpu")
        self._stages = [PipelineStage(module, number, stages, device) for number, module in modules.items()]
        make = TORCHS[work.case.schedule]
        one_stage = issubclass(make, torchs.PipelineScheduleSingle)
        self._schedule: Any = make(self._stages[0] if one_stage else self._stages, work.microbatches, loss_fn=loss)
        self._args = (batch.tokens,) if 0 in modules else ()
        self._target = {"target": batch.targets} if stages - 1 in modules else {}

    def step(self) -> None:
        self._schedule.step(*self._args, **self._target, return_outputs=False)

    def leave_out_received(self, live: Live) -> None:
        """Buffers for all microbatches are made with the first step, and stay."""
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                live.ignore(*(getattr(info, "buffer", None) for info in infos))

    def count_received_again(self) -> None:
        """Nothing was changed."""


class RankOfEngine:
    """What one rank of an engine measures of a case, once it is built."""

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        self._engine = engine
        self._rank = rank
        self._ranks = ranks
        self._run: Ours | Torchs | None = None
        self._parameters: list[nn.Parameter] = []
        self._batch: Batch | None = None

    def build(self, work: Work) -> None:
        self._run = None
        self._parameters = []
        placement = generate(work.case.schedule, self._ranks, work.microbatches).placement
        mine = [number for number, rank in enumerate(placement) if rank == self._rank]
        modules = {number: stage_module(work, number, len(placement)) for number in mine}
        self._batch = Batch.of(work)
        if self._engine is Engine.OURS:
            self._run = Ours(work, modules, self._batch)
        else:
            self._run = Torchs(work, modules, self._batch, len(placement))
        self._parameters = [p for module in modules.values() for p in module.parameters()]
        self._run.step()  # gradients, layouts, buffers: what comes with the first step stays

    def time(self) -> Timed:
        assert self._run is not None
        self._clear()
        before = meters.memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts from what is resident now
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self._run.step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        resident = meters.memory_bytes("VmHWM") - before
        norm = torch.stack([p.grad.float().norm() for p in self._parameters if p.grad is not None]).norm()
        return Timed(seconds, cpu, resident, float(norm))

    def look(self) -> Seen:
        assert self._run is not None and self._batch is not None
        self._clear()
        dist.barrier()
        with Live(peak=True) as live:
            live.ignore(*self._parameters, *(p.grad for p in self._parameters))
            live.ignore(self._batch.tokens, self._batch.targets)
            self._run.leave_out_received(live)
            self._run.step()
            gc.collect()
            seen = Seen(live.peak, live.bytes())
        self._run.count_received_again()
        return seen

    def _clear(self) -> None:
        """Gradients keep their memory, as those of an earlier microbatch would."""
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        gc.collect()
        meters.return_free_memory()


class PipelineRank(Member):
    ready = None

    def __init__(self, seat: Seat[None]) -> None:
        torch.set_num_threads(1)
        join_ranks(seat)
        self._measured = RankOfEngine(Engine(seat.contender), seat.rank, seat.world)

    def handlers(self) -> Handlers:
        return {
            Build: lambda command: self._measured.build(command.work),
            Look: lambda _: self._measured.look(),
            Time: lambda _: self._measured.time(),
        }
