"""Ranks that live once: each is a process of its own that runs a function and ends as it likes.

The pool of tests/harness.py keeps its processes alive, so it cannot show what others see when one ends.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import WORKER_ENVIRONMENT, _environment


@dataclass(frozen=True)
class Ending:
    """How a rank ended: its exit code (None: it had to be ended), its last error, and what it wrote to stderr."""

    code: int | None
    said: str
    stderr: str


def run_to_the_end(fn: Callable[..., None], world: int, *args: Any, timeout: float = 60.0) -> list[Ending]:
    """`fn(rank, world, *args)` on each rank, until all have ended or `timeout` seconds have passed."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with tempfile.TemporaryDirectory(prefix="endings-") as folder, _environment(WORKER_ENVIRONMENT):
        processes = [
            context.Process(target=_live, args=(fn, rank, world, store.port, folder, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [_ending(process, Path(folder), rank) for rank, process in enumerate(processes)]


def _ending(process: Any, folder: Path, rank: int) -> Ending:
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    said, stderr = folder / f"{rank}.said", folder / f"{rank}.stderr"
    return Ending(
        code,
        said.read_text() if said.exists() else "",
        stderr.read_text() if stderr.exists() else "",
    )


def _live(fn: Callable[..., None], rank: int, world: int, port: int, folder: str, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    errors = os.open(Path(folder, f"{rank}.stderr"), os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    try:
        fn(rank, world, *args)
    except BaseException as error:
        Path(folder, f"{rank}.said").write_text(traceback.format_exception_only(error)[-1].strip())
        raise
