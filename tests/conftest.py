"""Pools of ranks, shared by all tests of a session."""

from __future__ import annotations

import os

# Before torch: the plain references computed here must use the kernels that the ranks use.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.harness import RankPool

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
