"""Imported by this package's `__init__`: the cheap probes run here, once."""

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
    """Raises `InternalsChanged`. A torch that was not tested is mentioned, and used if nothing is found."""
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
    """For what needs a backward (probes.py, Rule 4). Raises `InternalsChanged`.

    Ranks may be threads of one process, and what some probes look at, such as autocast's cache, is the process's."""
    with _one_at_a_time:
        _check_once()


@functools.cache
def _check_once() -> None:
    check(When.FIRST_USE)


check_at_import()
