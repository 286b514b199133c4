"""Pools of ranks, shared by all tests of a session."""

from __future__ import annotations

import os

from tests.harness import WORKER_ENVIRONMENT, RankPool

# Before torch: the plain references computed here must use the kernels that the ranks use.
os.environ.update(WORKER_ENVIRONMENT)

from collections.abc import Callable, Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)` is the session's pool of that size; it starts at its first call."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        return pools.setdefault(world, RankPool(world))

    yield pool
    for each in pools.values():
        each.close()
