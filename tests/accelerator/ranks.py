"""Ranks that have the test device. It stays in their processes: torch cannot forget a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.accelerator import device
from tests.processes import Seat


class LateSeat(Seat):
    backend = device.BACKEND

    def join(self, timeout: float, generation: int = 0) -> None:
        device.load()
        device.of_rank(self.rank)
        super().join(timeout, generation)


def alone(rank: int, world: int, case: Callable[..., object], *args: object, **options: object) -> object:
    """`late_ranks(1).run(alone, case, ...)` is `case(...)` in a process with the device."""
    assert (rank, world) == (0, 1)
    return case(*args, **options)


EACH_MODE = pytest.mark.parametrize(("mode", "seed"), device.MODES)
# As late as permitted, the opposite, and a mixture: for what takes long. The checker finds races in any of them.
TELLING_MODES = pytest.mark.parametrize(("mode", "seed"), (("lazy", 0), ("sides", 0), ("random", 1)))


def each_case(*cases: Callable[..., object]) -> pytest.MarkDecorator:
    """Functions that are tests, but run in another process."""
    return pytest.mark.parametrize("case", cases, ids=[case.__name__ for case in cases])
