"""One rank of the window benchmark: an MLP that is trained with several backwards a step, in DeepSpeed's words.

The same program runs on DeepSpeed and on `retrograde.deepspeed`: what differs is the module that is imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import meters
from benchmarks.protocol import Seat
from benchmarks.worker import Handlers, Member, join_ranks


class Manner(StrEnum):
    """How the backwards of a step are reduced."""

    EACH = "each"  # as the stage does it
    COALESCED = "coalesced"
    HALF = "coalesced, budget of half"
    NO_SYNC = "no_sync"  # for all but the last, which takes the others along


@dataclass(frozen=True)
class Mlp:
    layers: int = 8
    width: int = 4096
    rows: int = 8  # of a batch

    @property
    def gradient_bytes(self) -> int:
        """Of all parameters, in bf16."""
        return 2 * self.layers * self.width**2


SMOKE = Mlp(layers=2, width=64)


@dataclass(frozen=True)
class Case:
    manner: Manner
    backwards: int


@dataclass(frozen=True)
class Time:
    """One step."""

    case: Case


@dataclass(frozen=True)
class Look:
    """One step, with a look at memory and at the wire."""

    case: Case


@dataclass(frozen=True)
class Ready:
    manners: tuple[Manner, ...]


@dataclass(frozen=True)
class Timed:
    seconds: float
    cpu_seconds: float  # of all threads of the rank


@dataclass(frozen=True)
class Seen:
    """Of one rank in one step. Bytes of memory are those above what was there before the window."""

    waiting: int  # when the last backward in the window has ended
    peak: int
    after: int  # when the window is closed, before the step
    sent: int  # in the whole step
    calls: dict[str, int]  # of torch.distributed
    exchanges: dict[str, int]  # as retrograde's ledger counts them


class Layer(nn.Module):
    """What retrograde makes a unit of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self, work: Mlp) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(work.width) for _ in range(work.layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


def _config(stage: int, native: bool) -> dict[str, Any]:
    """DeepSpeed is told that the model is bf16, and keeps fp32 masters; retrograde trains the model as it is."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    return config if not native else config | {"bf16": {"enabled": True}}


class WindowRank(Member):
    def __init__(self, seat: Seat[Mlp]) -> None:
        torch.set_num_threads(1)
        join_ranks(seat)
        package, _, stage = seat.contender.partition("-")
        native = package == "deepspeed"
        deepspeed = importlib.import_module("deepspeed" if native else "retrograde.deepspeed")
        if native:
            # Its shared-memory operator would leave a segment per rank in /dev/shm.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        torch.manual_seed(0)
        model = Model(seat.work).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(int(stage), native))
        self._ledger = None if native else self._engine.sharded.ledger
        self._budget = seat.work.gradient_bytes // 2
        generator = torch.Generator().manual_seed(seat.rank)
        self._x = torch.randn(seat.work.rows, seat.work.width, generator=generator).to(torch.bfloat16)
        for _ in range(2):  # pages, buckets and libraries: nothing that comes later is the first
            self._run(Case(Manner.EACH, 2))
            self._engine.step()
        self.ready = Ready(_manners(native, int(stage)))

    def handlers(self) -> Handlers:
        return {Time: self._time, Look: self._look}

    def _time(self, command: Time) -> Timed:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self._whole_step(command.case)
        return Timed(time.perf_counter() - start, time.process_time() - cpu)

    def _look(self, command: Look) -> Seen:
        """Memory in one step, calls in another: a profiler's own memory, which stays, would lie between the step's."""
        seen: dict[str, int] = {}
        before = _resident()
        _restart_peak()
        self._run(command.case, lambda: seen.update(waiting=_resident() - before))
        seen["peak"] = meters.memory_bytes("VmHWM") - before
        seen["after"] = _resident() - before
        self._engine.step()
        counts = self._exchanges()
        sent = self._sent()
        calls = meters.collectives_during(lambda: self._whole_step(command.case))
        dist.barrier()
        exchanges = dict(Counter(self._exchanges()) - Counter(counts))
        return Seen(**seen, sent=self._sent() - sent, calls=calls, exchanges=exchanges)

    def _whole_step(self, case: Case) -> None:
        self._run(case)
        self._engine.step()

    def _run(self, case: Case, at_end_of_window: Callable[[], object] = lambda: None) -> None:
        inside = case.backwards - (case.manner is Manner.NO_SYNC)
        with self._window(case.manner):
            for number in range(1, inside + 1):
                self._backward(last=number == case.backwards)
            at_end_of_window()
        if inside < case.backwards:
            self._backward(last=True)

    def _window(self, manner: Manner) -> AbstractContextManager[None]:
        match manner:
            case Manner.EACH:
                return contextlib.nullcontext()
            case Manner.COALESCED:
                return self._engine.coalesce_grad_reduction()  # type: ignore[no-any-return]
            case Manner.HALF:
                return self._engine.coalesce_grad_reduction(budget=self._budget)  # type: ignore[no-any-return]
            case Manner.NO_SYNC:
                return self._engine.no_sync()  # type: ignore[no-any-return]

    def _backward(self, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)  # DeepSpeed's stage 1 reduces there
        self._engine.backward(self._engine(self._x))

    def _sent(self) -> int:
        """Bytes of sockets. Within one host retrograde needs none: what its ledger has of pages and gradients."""
        if self._ledger is None:
            return meters.bytes_sent()
        return int(self._ledger.bytes("gather") + self._ledger.bytes("reduce"))

    def _exchanges(self) -> dict[str, int]:
        if self._ledger is None:
            return {}
        return {kind: self._ledger.count(kind) for kind in ("gather", "reduce", "join", "agree")}


def _manners(native: bool, stage: int) -> tuple[Manner, ...]:
    """A budget is retrograde's. DeepSpeed refuses `no_sync` at stages 2 and 3."""
    if not native:
        return tuple(Manner)
    return (Manner.EACH, Manner.COALESCED, *([Manner.NO_SYNC] if stage == 1 else []))


def _resident() -> int:
    gc.collect()
    meters.return_free_memory()
    return meters.memory_bytes("VmRSS")


def _restart_peak() -> None:
    """VmHWM starts from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
