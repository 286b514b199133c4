"""Starting ranks: processes forked from a warm one, a store where they meet, and an end that leaves nothing behind.

Starting torch costs seconds, so ranks are forked from a process that has imported it (preloaded.py). Two things are
made of them: the pools of harness.py, which live as long as the session, and the ranks of endings.py, which live once.
Nothing else in the tests starts ranks; what starts another program is a test of that program, and says so.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # docs/troubleshooting.md
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Seat:
    """What a process needs to take its place among the ranks. Others than the CPU have seats of their own."""

    backend: ClassVar[str] = "gloo"

    rank: int
    world: int
    store_port: int
    folder: str

    def file(self, kind: str) -> Path:
        """This rank's file of that kind, which ends with the ranks."""
        return Path(self.folder, f"rank{self.rank}.{kind}")

    def join(self, timeout: float, generation: int = 0) -> None:
        """Makes the default process group; `timeout` is that of its collectives, in seconds. Who makes another one
        after it counts its generations."""
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", self.store_port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"generation{generation}", store),
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=timeout),
        )


class Processes:
    """The processes of one world. Whoever makes them calls `end()`, whatever happens."""

    def __init__(self, world: int, seat: type[Seat] = Seat) -> None:
        import torch.distributed as dist

        # The store lives here, so its port is free for certain and no rank's death takes it along.
        self._store: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preloaded"])
        self._started: list[BaseProcess] = []
        self.seats = [seat(rank, world, self._store.port, self._folder.name) for rank in range(world)]

    def start(self, seat: Seat, target: Callable[..., None], *args: Any, daemon: bool = True) -> BaseProcess:
        """`target(seat, *args)` in a process of its own."""
        process = self._context.Process(
            target=_enter, args=(target, seat, *args), daemon=daemon, name=f"rank{seat.rank}"
        )
        with _environment(WORKER_ENVIRONMENT):
            process.start()
        self._started.append(process)
        return process

    def pipe(self) -> tuple[Connection, Connection]:
        return self._context.Pipe()

    def end(self) -> None:
        """Every process, at once and whatever it is doing."""
        started, self._started = self._started, []
        for process in started:
            process.kill()
        for process in started:
            process.join()
            process.close()
        self._store = None
        self._folder.cleanup()


def _enter(target: Callable[..., None], *args: Any) -> None:
    """Where every rank begins."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    target(*args)


def _die_with_parent() -> None:
    """A rank that hangs in a collective would outlive a test session that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


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
