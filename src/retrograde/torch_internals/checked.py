"""Imported by this package's `__init__`: the cheap probes run here, once."""

import logging

import torch

from retrograde.torch_internals import backward, memory, tensors, training
from retrograde.torch_internals.probes import TESTED, When, check

logger = logging.getLogger("retrograde")

WITH_PROBES = (backward, memory, tensors, training)  # imported: their probes are registered


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


check_at_import()
