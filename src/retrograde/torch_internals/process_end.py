"""The exception that ends a process, where Python's own finalizers can no longer see it."""

import contextlib
import functools
import multiprocessing
import multiprocessing.process
import sys

from retrograde.torch_internals.probes import expect, probe

_ended_by: list[BaseException] = []  # of a process that multiprocessing made, when its function has raised


def _keep_what_ends_a_child() -> None:
    run = multiprocessing.process.BaseProcess.run

    @functools.wraps(run)
    def run_and_keep(process: multiprocessing.process.BaseProcess) -> None:
        try:
            run(process)
        except BaseException as error:
            _ended_by[:] = [error]
            raise

    multiprocessing.process.BaseProcess.run = run_and_keep  # type: ignore[method-assign, assignment]


_keep_what_ends_a_child()  # when this is imported: a child that has come to shard() is in its run() already


def what_ends_this_process() -> BaseException | None:
    """The exception that nobody has caught, if there is one; called by finalizers.

    In a program, Python keeps it (`sys.last_value`). In a process that multiprocessing made, versions before 3.13 run
    finalizers while it is being handled, and later ones when it is gone."""
    if multiprocessing.parent_process() is None:
        return getattr(sys, "last_value", None)
    return sys.exc_info()[1] or next(iter(_ended_by), None)


@probe(
    "what ends a process",
    "what_ends_this_process",
    needed_for="telling other ranks why a process that multiprocessing made has ended",
    otherwise="a rank that fails is said to have finished",
)
def _children_run_our_run() -> None:
    """Assumes: a process that multiprocessing makes calls its `run()`, out of which comes what its function raises."""

    def fail() -> None:
        raise LookupError("probe")

    before = list(_ended_by)
    _ended_by.clear()
    try:
        with contextlib.suppress(LookupError):
            multiprocessing.Process(target=fail).run()
        expect([str(error) for error in _ended_by], ["probe"], "what is known of a process that failed")
    finally:
        _ended_by[:] = before
