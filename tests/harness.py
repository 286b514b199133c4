"""A pool of ranks for tests: warm processes, a process group, and a time limit on every call.

Starting torch costs seconds and a matrix of patterns has hundreds of cases, so ranks are forked from a process
that has imported it, and live as long as the test session. What a failed call leaves behind (collectives that
only some ranks entered) cannot be repaired from outside: after one, the pool is thrown away and the next call
starts another.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # docs/troubleshooting.md
    "GLOO_SOCKET_IFNAME": "lo",
}
START_LIMIT = 120.0
# An error on one rank usually leaves the others waiting for it: they get this long to say something too.
GRACE = 5.0
# Process groups made by the tasks die with the default group; renewing it keeps their threads from piling up.
CALLS_PER_GROUP = 500


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
class _Seat:
    """What a worker needs to take its place in the pool."""

    rank: int
    world: int
    store_port: int
    stack_file: str


@dataclass(frozen=True)
class _Answer:
    ok: bool
    value: Any


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stack_file: Path


class RankPool:
    """`world` processes that run `fn(rank, world, *args)` together, each as one rank of a gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

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
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        import torch.distributed as dist

        # The store lives here, so its port is free for certain and no rank's death takes it along.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        with _environment(WORKER_ENVIRONMENT):
            for rank in range(self.world):
                stack_file = Path(self._folder.name, f"rank{rank}.stack")
                seat = _Seat(rank, self.world, self._store.port, str(stack_file))
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(seat, theirs), daemon=True, name=f"rank{rank}")
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours, stack_file))
        try:
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
        silent = sorted(pending.values())
        if failures:
            raise RankError(failures, silent)
        if silent:
            raise RankTimeout(self._describe(silent, timeout))
        return [answers[rank].value for rank in range(self.world)]

    def _receive(self, rank: int, pipe: Connection) -> _Answer:
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            process = self._workers[rank].process
            process.join(GRACE)
            return _Answer(False, f"the process died with exit code {process.exitcode}\n")

    def _describe(self, silent: list[int], timeout: float) -> str:
        for rank in silent:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # faulthandler writes on its own
        lines = [f"ranks {silent} of {self.world} did not finish in {timeout:g} s and were ended"]
        lines += [f"--- rank {rank} ---\n{self._workers[rank].stack_file.read_text()}" for rank in silent]
        return "\n".join(lines)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Children inherit the variables before they import torch; this process gets its own back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(seat: _Seat, pipe: Connection) -> None:
    """A worker's life: join, then one task after the other until the pool closes the pipe."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(seat.stack_file, "w") as stack_file:
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


def _answer(group: _Group, seat: _Seat, fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
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

    def __init__(self, seat: _Seat) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._dist = dist
        self._seat = seat
        self._store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False, wait_for_workers=False)
        self._calls = 0
        self._generation = 0

    def enter_call(self) -> None:
        self._calls += 1
        if self._calls % CALLS_PER_GROUP == 0:
            gc.unfreeze()
            gc.collect()
            self.renew()

    def renew(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()
        self._generation += 1
        self._dist.init_process_group(
            "gloo",
            store=self._dist.PrefixStore(f"generation{self._generation}", self._store),
            rank=self._seat.rank,
            world_size=self._seat.world,
            timeout=datetime.timedelta(seconds=START_LIMIT),
        )


def _die_with_parent() -> None:
    """A rank that hangs in a collective would outlive a test session that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
