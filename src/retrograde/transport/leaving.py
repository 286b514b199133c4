"""How a process leaves the others: at its end, and when a process group is destroyed.

A rank that has finished may still be read by one that has not. So ranks say goodbye, and serve until all have. A rank
that fails does not wait: it says what went wrong and goes.

                    finishes            waits, and answers reads
    rank 1   ───────────┤ goodbye ├──────────────────────────────┐
    rank 0   ────────────────── saves the model ──┤ goodbye ├────┤ both have said it: connections close

Ways to leave, and how each is noticed:
- the program ends, or `sys.exit()`: `atexit`, when all other threads have been joined but for the service threads;
- it ends because of an exception nobody caught: the same, and the interpreter keeps that exception (`sys.last_value`);
- a process that was made by `multiprocessing` has finalizers of its own, and before Python 3.13 ends without `atexit`;
- `dist.destroy_process_group()`: it shuts each group down, and `ProcessGroup.shutdown` is ours around torch's own.
  Before the first group of our own is shut all connections are left (own_groups.py, Rule 4);
- `os._exit()` and signals: nothing runs here, and the others find the connection lost (connections.py).

In a program that ends by `sys.exit(1)`, Python does not say so to `atexit`: such a rank says goodbye as if it had
finished.
"""

import atexit
import functools
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import torch.distributed as dist

from retrograde.errors import RetrogradeError
from retrograde.torch_internals import before_group_shutdown, what_ends_this_process
from retrograde.transport.own_groups import is_own

logger = logging.getLogger("retrograde")


class Leaver(Protocol):
    """Connections to other ranks, as far as leaving them is concerned."""

    rank: int
    process: int

    def say_goodbye(self) -> None:
        """Say that this rank has finished. Does not wait, and may be called anywhere."""

    def wait_for_goodbyes(self) -> str | None:
        """Serve until all have said it; returns what there is to tell about those that did not."""

    def abandon(self, why: str) -> None:
        """Say what went wrong, and close the connections."""

    def unsaid(self) -> list[str]:
        """What other ranks have said to have gone wrong, and nobody here has been told by an exception."""


_open: list[Leaver] = []
_of_group: Callable[[dist.ProcessGroup], Leaver | None]


def watch(leaver: Leaver, of_group: Callable[[dist.ProcessGroup], Leaver | None]) -> None:
    """Leave these connections properly, whenever the process ends or their group is destroyed."""
    global _of_group
    _of_group = of_group
    _open.append(leaver)
    _register_in(os.getpid())
    _wrap_shutdown()


def forget(leaver: Leaver) -> None:
    """Forget connections that have been left."""
    if leaver in _open:
        _open.remove(leaver)


@functools.cache
def _register_in(process: int) -> None:
    """Register `_at_exit` once in each process: one that was forked does not run its parent's finalizers."""
    atexit.register(_at_exit)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)


@functools.cache
def _wrap_shutdown() -> None:
    def leave_group(group: dist.ProcessGroup) -> None:
        leaver = _of_group(group)
        leave([each for each in _open if each is leaver or is_own(group)], sys.exc_info()[1])

    before_group_shutdown(leave_group)


def _at_exit() -> None:
    leave(list(_open), what_ends_this_process())


def leave(leavers: Iterable[Leaver], error: BaseException | None) -> None:
    """Leave all of them: because of an error, or having finished."""
    mine = [
        leaver for leaver in leavers if leaver.process == os.getpid()
    ]  # one that was forked leaves its parent's alone
    failure = _failure(error)
    if failure is not None:
        for leaver in mine:
            for text in leaver.unsaid():
                logger.warning("retrograde: rank %d was told before it ended: %s", leaver.rank, text)
            leaver.abandon(
                failure if isinstance(error, RetrogradeError) else f"rank {leaver.rank} ended with {failure}"
            )
            forget(leaver)
        return
    for leaver in mine:
        leaver.say_goodbye()
    for leaver in mine:
        told = leaver.wait_for_goodbyes()
        if told is not None:
            logger.warning("retrograde: %s", told)
        for text in leaver.unsaid():
            logger.warning("retrograde: rank %d had finished when something went wrong: %s", leaver.rank, text)
        forget(leaver)


def _failure(error: BaseException | None) -> str | None:
    """What to say about an error that ends this process; None if it is none."""
    if error is None:
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"exit status {error.code}"
    if isinstance(error, RetrogradeError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
