"""One rank of the overhead benchmark: many small parameters, and what a training loop does to all of them at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.contenders import fully_shard_blocks
from benchmarks.protocol import Seat
from benchmarks.worker import Handlers, Member, join_ranks

PLAIN = "plain"
WHOLE_STEP = "whole step"
_LAYERS = 5  # in a block, of two parameters each
_NEVER_REACHED = 1e9  # a norm: gradients are multiplied by 1, and stay what they are


@dataclass(frozen=True)
class SmallParameters:
    """Models of so many parameters: half of them weights of (rows, width), half biases of (rows)."""

    counts: tuple[int, ...] = (100, 1000)
    rows: int = 16
    width: int = 16
    batch: int = 8


SMOKE = SmallParameters(counts=(10, 20))


@dataclass(frozen=True)
class Case:
    """What is done, and to how many parameters."""

    operation: str
    parameters: int


@dataclass(frozen=True)
class Measure:
    """Do it once, which does not count, then `calls` times."""

    case: Case
    calls: int


@dataclass(frozen=True)
class Built:
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Measured:
    """Seconds of each call."""

    cpu: tuple[float, ...]  # of all threads of the rank
    main_thread: tuple[float, ...]  # CPU time of the training loop's own
    wall: tuple[float, ...]
    cpu_so_far: float  # of the process, since it began


class Layer(nn.Module):
    """A weight and a bias of any number of rows: what comes out is as wide as what went in."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight, self.bias)).mean(-1, keepdim=True)


class Block(nn.Sequential):
    """What every engine makes a unit of."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(*(Layer(rows, width) for _ in range(_LAYERS)))


class Model(nn.Module):
    def __init__(self, parameters: int, rows: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(rows, width) for _ in range(parameters // (2 * _LAYERS))))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


# ---- the engines compared
def _leave_plain(model: Model) -> None:
    """Nothing is sharded, and nothing is sent."""


def _shard_fsdp2(model: Model) -> None:
    fully_shard_blocks(model, model.blocks, reshard=True)


def _shard_retrograde(model: Model) -> None:
    import retrograde as rg

    rg.shard(model, stage=3, units=(Block,))


ENGINES: dict[str, Callable[[Model], None]] = {
    PLAIN: _leave_plain,
    "fsdp2": _shard_fsdp2,
    "retrograde-3": _shard_retrograde,
}


# ---- what is done to the parameters
def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Operation:
    """Something that is timed, and what has to be done around it, which is not."""

    run: Callable[[], object]
    before_call: Callable[[], object] = _nothing
    after_turn: Callable[[], object] = _nothing

    def take_turn(self, calls: int) -> Measured:
        seconds = [self._timed() for _ in range(calls)]
        self.after_turn()
        cpu, main_thread, wall = zip(*seconds, strict=True)
        return Measured(cpu, main_thread, wall, time.process_time())

    def _timed(self) -> tuple[float, ...]:
        self.before_call()
        began = _clocks()
        self.run()
        return tuple(now - then for now, then in zip(_clocks(), began, strict=True))


def _clocks() -> tuple[float, float, float]:
    return time.process_time(), time.thread_time(), time.perf_counter()


class Training:
    """A model and its optimizers. After it is made, its parameters have the gradients of one backward."""

    def __init__(self, model: Model, batch: Tensor) -> None:
        self._model = model
        self._batch = batch
        params = list(model.parameters())
        self._fused = torch.optim.AdamW(params, lr=1e-4, fused=True)
        self._optimizers = {
            "AdamW(fused=True).step": self._fused,
            "AdamW(foreach=True).step": torch.optim.AdamW(params, lr=1e-4, foreach=True),
            "AdamW().step": torch.optim.AdamW(params, lr=1e-4),
            "SGD(foreach=True).step": torch.optim.SGD(params, lr=1e-4, foreach=True),
        }
        self._clip = partial(clip_grad_norm_, params, _NEVER_REACHED)
        self.backward()

    def operations(self) -> dict[str, Operation]:
        """After a turn of any of them all parameters have gradients: most of these look for nothing else."""
        found = {name: Operation(optimizer.step) for name, optimizer in self._optimizers.items()}
        found["clip_grad_norm_"] = Operation(self._clip)
        for to_none in (True, False):
            run = partial(self._fused.zero_grad, set_to_none=to_none)
            found[f"zero_grad(set_to_none={to_none})"] = Operation(run, self._backward_and_step, self.backward)
        return found

    def backward(self) -> None:
        self._model(self._batch).backward()

    def step(self) -> None:
        self.backward()
        self._clip()
        self._fused.step()
        self._fused.zero_grad()

    def _backward_and_step(self) -> None:
        """What comes before `zero_grad()` in a loop: waiting for gradients is not a part of it."""
        self.backward()
        self._fused.step()


class OverheadRank(Member):
    def __init__(self, seat: Seat[SmallParameters]) -> None:
        torch.set_num_threads(1)
        join_ranks(seat)
        self._seat = seat
        self._operations: dict[Case, Operation] = {}
        for count in seat.work.counts:
            for name, operation in self._training(count, self._local_rows()).operations().items():
                self._operations[Case(name, count)] = operation
        most = max(seat.work.counts)
        self._operations[Case(WHOLE_STEP, most)] = Operation(self._training(most, seat.work.rows).step)
        self.ready = Built(tuple(self._operations))

    def _local_rows(self) -> int:
        """Rows of the parameters made: a plain one has as many as FSDP2 leaves on a rank of one that it shards."""
        rows = self._seat.work.rows
        return rows // self._seat.world if self._seat.contender == PLAIN else rows

    def _training(self, count: int, rows: int) -> Training:
        work = self._seat.work
        torch.manual_seed(0)
        model = Model(count, rows, work.width)
        batch = torch.randn(work.batch, work.width)
        ENGINES[self._seat.contender](model)
        return Training(model, batch)

    def handlers(self) -> Handlers:
        return {Measure: self._measure}

    def _measure(self, asked: Measure) -> Measured:
        operation = self._operations[asked.case]
        operation.take_turn(calls=1)
        dist.barrier()
        return operation.take_turn(asked.calls)
