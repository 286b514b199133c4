"""Ranks that live once: each is a process of its own that runs a function and ends as it likes.

For tests that are about the end of a process: the pools of tests/harness.py keep theirs alive, so they cannot show what
others see when one ends.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from tests.processes import Processes, Seat


@dataclass(frozen=True)
class Ending:
    """How a rank ended: its exit code (None: it had to be ended), its last error, and what it wrote to stderr."""

    code: int | None
    said: str
    stderr: str


def run_to_the_end(
    fn: Callable[..., None], world: int, *args: Any, timeout: float = 60.0, seat: type[Seat] = Seat
) -> list[Ending]:
    """`fn(rank, world, *args)` on each rank, until all have ended or `timeout` seconds have passed."""
    processes = Processes(world, seat)
    try:
        # No daemons: multiprocessing ends those in its own way.
        started = [processes.start(each, _live, fn, args, daemon=False) for each in processes.seats]
        deadline = time.monotonic() + timeout
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        return [_ending(process, each) for process, each in zip(started, processes.seats, strict=True)]
    finally:
        processes.end()


def _ending(process: BaseProcess, seat: Seat) -> Ending:
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    said, stderr = seat.file("said"), seat.file("stderr")
    return Ending(
        code,
        said.read_text() if said.exists() else "",
        stderr.read_text() if stderr.exists() else "",
    )


def _live(seat: Seat, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    errors = os.open(seat.file("stderr"), os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    seat.join(timeout=60.0)
    try:
        fn(seat.rank, seat.world, *args)
    except BaseException as error:
        seat.file("said").write_text(traceback.format_exception_only(error)[-1].strip())
        raise
