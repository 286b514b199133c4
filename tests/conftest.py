"""Pools of ranks, shared by all tests of a session."""

from __future__ import annotations

import os

from tests.harness import WORKER_ENVIRONMENT, Pools

# Before torch: the plain references computed here must use the kernels that the ranks use.
os.environ.update(WORKER_ENVIRONMENT)

import contextlib
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world)` is the session's pool of that size."""
    with contextlib.closing(Pools()) as pools:
        yield pools
