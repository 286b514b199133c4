"""One rank of one contender: builds it, then sleeps on a pipe and runs a turn when it is told to.

`Member` is what the ranks of all benchmarks have in common, `Rank` is one that trains the GPT.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import meters
from benchmarks.contenders import CONTENDERS
from benchmarks.model import Batches, Workload, build
from benchmarks.protocol import Close, Closed, Count, Counted, Failed, Ready, Seat, Turn, TurnTaken

Handlers = dict[type, Callable[..., object]]  # by the type of a command; what they return is the reply
_PR_SET_PDEATHSIG = 1


class Member:
    """Answers commands until it is told to close."""

    ready: object  # the first reply, sent before there is a command

    def handlers(self) -> Handlers:
        raise NotImplementedError

    def serve(self, pipe: Connection) -> None:
        handlers = self.handlers()
        while True:
            command = pipe.recv()
            if isinstance(command, Close):
                pipe.send(self._close())
                return
            pipe.send(handlers[type(command)](command))

    def _close(self) -> Closed:
        dist.barrier()
        dist.destroy_process_group()
        return Closed()


def main(seat: Seat[Any], pipe: Connection, member: Callable[[Seat[Any]], Member]) -> None:
    # A rank may be stuck in a collective when the harness is killed, and would then outlive it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != seat.harness:  # it was killed before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness's to handle
    _redirect_output(seat.log)
    try:
        rank = member(seat)
        pipe.send(rank.ready)
        rank.serve(pipe)
    except EOFError:  # the harness closed its end
        pass
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        os._exit(1)  # a clean exit would wait for peers that may never answer


class Rank(Member):
    def __init__(self, seat: Seat[Workload]) -> None:
        torch.set_num_threads(1)
        join_ranks(seat)
        contender = CONTENDERS[seat.contender]
        importlib.import_module(contender.package)
        base = meters.memory_bytes("VmRSS")
        model = build(seat.work)
        parameters = sum(p.numel() for p in model.parameters())
        self._batches = Batches(seat.work, seat.rank)
        self._training = contender.setup(model, seat.work)
        self.ready = Ready(parameters, base, meters.memory_bytes("VmHWM"))
        self._asleep_since = time.perf_counter()
        self._cpu_when_asleep = time.process_time()

    def handlers(self) -> Handlers:
        return {Turn: self._turn, Count: self._count}

    def _turn(self, turn: Turn) -> TurnTaken:
        idle = time.perf_counter() - self._asleep_since
        idle_cpu = time.process_time() - self._cpu_when_asleep
        woken_cpu = time.process_time()
        losses = [self._train() for _ in range(turn.settle)]
        dist.barrier()
        sent = self._training.sent()
        seconds = []
        for _ in range(turn.steps):
            start = time.perf_counter()
            losses.append(self._train())
            seconds.append(time.perf_counter() - start)
        sent = self._training.sent() - sent
        peak = meters.memory_bytes("VmHWM")
        meters.return_free_memory()
        self._asleep_since = time.perf_counter()
        self._cpu_when_asleep = time.process_time()
        return TurnTaken(
            seconds=tuple(seconds),
            losses=tuple(losses),
            sent_bytes_per_step=sent / turn.steps,
            cpu_seconds=self._cpu_when_asleep - woken_cpu,
            idle_cpu_seconds=idle_cpu,
            idle_seconds=idle,
            peak_rss=peak,
        )

    def _train(self) -> float:
        return self._training.step(*self._batches.take())

    def _count(self, _: Count) -> Counted:
        before = self._training.exchanges()
        calls = meters.collectives_during(self._train)
        after = self._training.exchanges()
        meters.return_free_memory()
        return Counted(calls, dict(Counter(after) - Counter(before)))


def join_ranks(seat: Seat[Any]) -> None:
    # The names torchrun would have set: DeepSpeed reads them even when the group exists already.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.port),
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world),
        LOCAL_WORLD_SIZE=str(seat.world),
    )
    limit = timedelta(seconds=seat.patience)
    store = dist.TCPStore("127.0.0.1", seat.port, seat.world, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world, timeout=limit)


def _redirect_output(path: str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
