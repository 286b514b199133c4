"""A pool of ranks for tests: warm processes, a process group, and a time limit on every call.

A matrix of patterns has hundreds of cases, so ranks (processes.py) live as long as the test session. What a failed
call leaves behind (collectives that only some ranks entered) cannot be repaired from outside: after one, the pool is
thrown away and the next call starts another.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.processes import WORKER_ENVIRONMENT, Processes, Seat

__all__ = ["WORKER_ENVIRONMENT", "Pools", "RankError", "RankPool", "RankTimeout", "Ranks"]

START_LIMIT = 120.0
# An error on one rank usually leaves the others waiting for it: they get this long to say something too.
GRACE = 5.0
# Process groups made by the tasks die with the default group. Renewing it keeps their threads from piling up: one of
# each of gloo's wakes up a hundred times a second.
CALLS_PER_GROUP = 20


class RankError(AssertionError):
    """One or more ranks raised. `failures` maps a rank to its traceback."""

    def __init__(self, failures: dict[int, str], silent: list[int]) -> None:
        self.failures = failures
        text = [f"{len(failures)} rank(s) failed: {sorted(failures)}"]
        if silent:
            text.append(f"ranks {silent} had not finished {GRACE:g} s later")
        text += [f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures)]
        super().__init__("\n".join(text))


class RankTimeout(AssertionError):
    """Ranks did not answer in time; the message shows where they were."""


@dataclass(frozen=True)
class _Answer:
    ok: bool
    value: Any


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stack_file: Path


class RankPool:
    """`world` processes that run `fn(rank, world, *args)` together, each as one rank of the seats' process group."""

    def __init__(self, world: int, seat: type[Seat] = Seat) -> None:
        self.world = world
        self._seat = seat
        self._workers: list[_Worker] = []
        self._processes: Processes | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        beside: Callable[[], object] = lambda: None,
        **kwargs: Any,
    ) -> list[Any]:
        """Results in rank order. Raises `RankError` or `RankTimeout`, and then drops the pool.

        `beside` is called while the ranks work."""
        message = pickle.dumps((fn, args, kwargs))
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if not self._workers:
            self._start()
        try:
            for worker in self._workers:
                worker.pipe.send_bytes(message)
            beside()
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every process, at once and whatever it is doing."""
        if self._processes is not None:
            self._processes.end()
            self._processes = None
        for worker in self._workers:
            worker.pipe.close()
        self._workers = []

    def _start(self) -> None:
        self._processes = Processes(self.world, self._seat)
        try:
            for seat in self._processes.seats:
                ours, theirs = self._processes.pipe()
                process = self._processes.start(seat, _serve, theirs)
                theirs.close()
                self._workers.append(_Worker(process, ours, seat.file("stack")))
            self._collect(START_LIMIT)
        except BaseException:
            self.close()
            raise

    def _collect(self, timeout: float) -> list[Any]:
        """One answer of every rank."""
        deadline = time.monotonic() + timeout
        answers: dict[int, _Answer] = {}
        failures: dict[int, str] = {}
        pending = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                answers[rank] = self._receive(rank, pipe)
                if not answers[rank].ok:
                    failures[rank] = answers[rank].value
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in [rank for rank in pending.values() if not self._workers[rank].process.is_alive()]:
            failures[rank] = self._died(rank)  # on a busy machine its pipe may still look open
        silent = sorted(set(pending.values()) - set(failures))
        if failures:
            raise RankError(failures, silent)
        if silent:
            raise RankTimeout(self._describe(silent, timeout))
        return [answers[rank].value for rank in range(self.world)]

    def _receive(self, rank: int, pipe: Connection) -> _Answer:
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            self._workers[rank].process.join(GRACE)
            return _Answer(False, self._died(rank))

    def _died(self, rank: int) -> str:
        return f"the process died with exit code {self._workers[rank].process.exitcode}\n"

    def _describe(self, silent: list[int], timeout: float) -> str:
        for rank in silent:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # faulthandler writes on its own
        lines = [f"ranks {silent} of {self.world} did not finish in {timeout:g} s and were ended"]
        lines += [f"--- rank {rank} ---\n{self._workers[rank].stack_file.read_text()}" for rank in silent]
        return "\n".join(lines)


class Pools:
    """`pools(world)` is the pool of that size, which starts when it is first used."""

    def __init__(self, seat: type[Seat] = Seat) -> None:
        self._seat = seat
        self._by_world: dict[int, RankPool] = {}

    def __call__(self, world: int) -> RankPool:
        if world not in self._by_world:
            self._by_world[world] = RankPool(world, self._seat)
        return self._by_world[world]

    def close(self) -> None:
        for pool in self._by_world.values():
            pool.close()


Ranks = Callable[[int], RankPool]  # what tests get as `ranks`


def _serve(seat: Seat, pipe: Connection) -> None:
    """A worker's life: join, then one task after the other until the pool closes the pipe."""
    with open(seat.file("stack"), "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            from tests.live import settle

            group = _Group(seat)
            group.renew()
            settle()
        except BaseException:
            pipe.send_bytes(pickle.dumps(_Answer(False, traceback.format_exc())))
            return
        pipe.send_bytes(pickle.dumps(_Answer(True, None)))
        while True:
            try:
                fn, args, kwargs = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(_answer(group, seat, fn, args, kwargs))


def _answer(group: _Group, seat: Seat, fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        group.enter_call()
        gc.collect()
        gc.freeze()  # what earlier calls have imported (a compiler's half million objects) is out of gc's way
        # Plain pickle: the pickler of multiprocessing would move tensors through shared memory files.
        return pickle.dumps(_Answer(True, fn(seat.rank, seat.world, *args, **kwargs)))
    except BaseException:
        return pickle.dumps(_Answer(False, traceback.format_exc()))


class _Group:
    """The default process group of a worker."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._calls = 0
        self._generation = 0

    def enter_call(self) -> None:
        self._calls += 1
        if self._calls % CALLS_PER_GROUP == 0:
            gc.unfreeze()
            gc.collect()
            self.renew()

    def renew(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._generation += 1
        self._seat.join(START_LIMIT, self._generation)
