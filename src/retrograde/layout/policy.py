"""What a stage means: two answers to "how long does it live?", as data."""

import math
import re
from typing import NamedTuple

import torch

from retrograde.arguments import flag, integer, number, one_of, wrong
from retrograde.layout.offload import Offload
from retrograde.layout.precision import AS_IT_IS, Precision

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(value: int | float | str, argument: str) -> float:
    """Bytes from a number or a text like "2GiB"."""
    fix = 'bytes or a text like "2GiB"'
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise wrong(argument, value, "is not a size", fix)
        return float(match[1]) * _UNITS[match[2].lower()]
    size = number(argument, value, fix, cause="is not a size")
    if size < 0:
        raise wrong(argument, value, "is negative", "0 or more bytes")
    return size


def check_stage(value: object) -> int:
    """Check a stage. Only whole numbers are stages: True is not 1, and 3.0 is not 3."""
    fix = "1, 2 or 3"
    stage = integer(value)
    if stage not in (1, 2, 3):
        raise wrong("stage", value, "is out of range", fix)
    return stage


def check_reduce(value: object) -> str:
    return one_of("reduce", value, ("mean", "sum"), '"mean" or "sum"')


class Policy(NamedTuple):
    """What the arguments of `shard()` come to. Stages 1, 2 and 3 differ in these two numbers and in nothing else.

    `resident`: bytes of pages that may stay beyond the page in use and the one being prefetched.
    `until_step`: an unreduced gradient waits for the step instead of being reduced in its backward.
    """

    resident: float
    until_step: bool
    mean: bool = True
    prefetch: bool = True
    precision: Precision = AS_IT_IS
    exact: bool = True  # added up in rank order, not as the backend likes
    offload: Offload = Offload.NOTHING  # as it was asked for: on the host there is nothing to move

    @property
    def keeps_pages(self) -> bool:
        return self.resident == math.inf

    def on_the_wire(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of this dtype travels; there is no narrow complex number."""
        wire = self.precision.wire
        return dtype if wire is None or dtype.is_complex else wire

    def waiting(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of this dtype are added up before they are sent."""
        waiting = self.precision.waiting
        return dtype if waiting is None or dtype.is_complex else waiting

    def between_replicas(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which sums of gradients of this dtype travel:
        unless told otherwise, that in which they were added up."""
        if self.precision.wire is None:
            return torch.promote_types(dtype, torch.float32)
        return self.on_the_wire(dtype)

    @staticmethod
    def of(
        stage: int,
        resident: float | str,
        reduce: str,
        prefetch: bool,
        precision: Precision | str | None = None,
        exact: bool = True,
        offload: Offload | str | None = None,
    ) -> "Policy":
        """Make a policy of the arguments of `shard()`."""
        stage = check_stage(stage)
        mean = check_reduce(reduce) == "mean"
        kept = parse_bytes(resident, "resident")
        if stage < 3:
            kept = math.inf
        prefetch = flag("prefetch", prefetch)
        exact = flag("exact", exact)
        return Policy(kept, stage == 1, mean, prefetch, Precision.of(precision), exact, Offload.of(offload))
