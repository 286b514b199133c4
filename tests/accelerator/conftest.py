"""Pools of ranks with the test device, shared by all tests of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.accelerator import build
from tests.accelerator.ranks import LateSeat
from tests.harness import Pools


@pytest.fixture(scope="session")
def late_ranks() -> Iterator[Pools]:
    """`late_ranks(world)` is as `ranks(world)`, with the device "late" and a process group for it. Also tests that
    need one process run there, so that this one stays as it is."""
    build.build()  # here, where no rank's time limit runs
    with contextlib.closing(Pools(LateSeat)) as pools:
        yield pools
