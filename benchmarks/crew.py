"""A contender's ranks as processes that stay alive, idle between their turns."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import worker
from benchmarks.protocol import Close, Failed, Seat

# Inherited by the ranks, and read by libraries while they are imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # some CPUs advertise AMX that cannot be used, and die in bf16
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the rank's own process: no pool that outlives the compilation
}
_LOG_LINES_SHOWN = 15


class CrewError(Exception):
    """A rank raised, died or took too long; says which one and why."""


class Crew:
    def __init__(
        self,
        contender: str,
        work: Any,
        world: int,
        logs: Path,
        limit: float,
        member: Callable[[Seat[Any]], worker.Member] = worker.Rank,
    ) -> None:
        """`member` makes a rank of a seat in the new process, and `work` is what it is given to do."""
        self.contender = contender
        self._limit = limit
        self._logs = [logs / f"{contender}-{rank}.log" for rank in range(world)]
        # Hosted here, as torchrun does: the system chooses the port, so two runs never collide.
        self._store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        spawn = multiprocessing.get_context("spawn")
        try:
            for rank in range(world):
                log = str(self._logs[rank])
                seat = Seat(contender, work, rank, world, self._store.port, log, os.getpid(), limit)
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=worker.main, args=(seat, theirs, member), daemon=True)
                process.start()
                theirs.close()  # so that a dead rank is seen as the end of its pipe
                self._processes.append(process)
                self._pipes.append(ours)
            self.ready = self._answers()
        except BaseException:
            self.kill()
            raise

    def ask(self, command: object) -> list[Any]:
        """Send `command` to every rank at once and wait for all answers."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except OSError as error:
                raise CrewError(self._describe(rank, "died while idle")) from error
        return self._answers()

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + self._limit
        return [self._answer(rank, deadline) for rank in range(len(self._pipes))]

    def _answer(self, rank: int, deadline: float) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise CrewError(self._describe(rank, f"no answer within {self._limit:.0f} s"))
        try:
            reply = pipe.recv()
        except (EOFError, OSError) as error:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise CrewError(self._describe(rank, f"process ended with code {code}")) from error
        if isinstance(reply, Failed):
            raise CrewError(self._describe(rank, "raised\n" + reply.error))
        return reply

    def _describe(self, rank: int, what: str) -> str:
        log = self._logs[rank]
        said = log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:] if log.exists() else []
        return "\n  ".join([f"{self.contender}, rank {rank}: {what}", *said])

    def close(self) -> None:
        """End the ranks in good order; if they will not, end them anyway."""
        try:
            self.ask(Close())
            for process in self._processes:
                process.join(10)
        except CrewError:
            pass  # the results are in; what matters now is that no process stays
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes = []
        self._pipes = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()
