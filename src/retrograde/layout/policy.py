"""What a stage means: two answers to "how long does it live?", as data."""

import math
import re
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Policy:
    """Stages 1, 2 and 3 differ in these two numbers and in nothing else.

    `resident`: bytes of pages that may stay beyond the page in use and the one being prefetched.
    `until_step`: an unreduced gradient waits for the step instead of being reduced in its backward.
    """

    resident: float
    until_step: bool
    mean: bool = True
    prefetch: bool = True

    @property
    def keeps_pages(self) -> bool:
        return self.resident == math.inf

    @staticmethod
    def of(stage: int, resident: int | float | str, reduce: str, prefetch: bool) -> "Policy":
        if stage not in (1, 2, 3):
            raise ShardingError(f"stage={stage!r} is out of range; give 1, 2 or 3")
        if reduce not in ("mean", "sum"):
            raise ShardingError(f'reduce={reduce!r} is not known; give "mean" or "sum"')
        kept = parse_bytes(resident, "resident") if stage == 3 else math.inf
        return Policy(resident=kept, until_step=stage == 1, mean=reduce == "mean", prefetch=prefetch)
