"""Runs the cheap probes, once, when this package's `__init__` imports it."""

import functools
import logging
import threading
from importlib import import_module

import torch

from retrograde.torch_internals.probes import TESTED, When, check

logger = logging.getLogger("retrograde")

# Imported, so that their probes are registered.
WITH_PROBES = tuple(
    import_module(f"{__package__}.{name}")
    for name in (
        "backends",
        "backward",
        "checkpoints",
        "compiler",
        "constructors",
        "functions",
        "groups",
        "memory",
        "modules",
        "process_end",
        "tensors",
        "training",
        "trees",
        "wrapping",
    )
)


def check_at_import() -> None:
    """Run the probes of import; raises `InternalsChanged`. If they hold, a torch that was not tested is only logged."""
    held = check(When.IMPORT)
    if not torch.__version__.startswith(f"{TESTED}."):
        logger.warning(
            "retrograde is tested with torch %s, not with %s: all %d probes at import passed; run `retrograde doctor` "
            "for the others",
            TESTED,
            torch.__version__,
            held,
        )


_one_at_a_time = threading.Lock()


def check_before_first_use() -> None:
    """Run the probes that need a backward (probes.py, Rule 4); raises `InternalsChanged`.

    Only one thread runs them at a time, since ranks may be threads, and some probes look at what threads share."""
    with _one_at_a_time:
        _check_once()


@functools.cache
def _check_once() -> None:
    check(When.FIRST_USE)


check_at_import()
