"""What a stage means: two answers to "how long does it live?", as data."""

import math
import re
from typing import NamedTuple

import torch

from retrograde.errors import ShardingError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(value: int | float | str, argument: str) -> float:
    """Bytes from a number or a text like "2GiB"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", value)
        if match is not None and match[2].lower() in _UNITS:
            return float(match[1]) * _UNITS[match[2].lower()]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ShardingError(f'{argument}={value!r} is not a size; give bytes or a text like "2GiB"')
    if value < 0:
        raise ShardingError(f"{argument}={value!r} is negative; give 0 or more bytes")
    return value


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(NamedTuple):
    """`reduce`: the dtype in which gradients travel (their own, if None); they are added up in fp32 whatever it is."""

    reduce: str | torch.dtype | None = None

    @property
    def wire(self) -> torch.dtype | None:
        wire = _DTYPES.get(self.reduce) if isinstance(self.reduce, str) else self.reduce
        if self.reduce is not None and (wire is None or not wire.is_floating_point):
            raise ShardingError(f"precision.reduce={self.reduce!r} is not known; give {', '.join(_DTYPES)} or a dtype")
        return wire


class Policy(NamedTuple):
    """Stages 1, 2 and 3 differ in these two numbers and in nothing else.

    `resident`: bytes of pages that may stay beyond the page in use and the one being prefetched.
    `until_step`: an unreduced gradient waits for the step instead of being reduced in its backward.
    """

    resident: float
    until_step: bool
    mean: bool = True
    prefetch: bool = True
    wire: torch.dtype | None = None  # in which gradients travel, if not in their own dtype
    exact: bool = True  # added up in rank order, not as the backend likes

    @property
    def keeps_pages(self) -> bool:
        return self.resident == math.inf

    @staticmethod
    def of(
        stage: int, resident: float | str, reduce: str, prefetch: bool,
        precision: Precision | None = None, exact: bool = True,
    ) -> "Policy":  # fmt: skip
        if stage not in (1, 2, 3):
            raise ShardingError(f"stage={stage!r} is out of range; give 1, 2 or 3")
        if reduce not in ("mean", "sum"):
            raise ShardingError(f'reduce={reduce!r} is not known; give "mean" or "sum"')
        if precision is not None and not isinstance(precision, Precision):
            raise ShardingError(f"precision={precision!r} is not known; give rg.Precision(reduce=...) or None")
        kept = parse_bytes(resident, "resident") if stage == 3 else math.inf
        return Policy(kept, stage == 1, reduce == "mean", prefetch, precision.wire if precision else None, exact)
