"""Pools of ranks, shared by all tests of a session, and the markers of `make quick` and `make test-all`."""

from __future__ import annotations

import os

from tests.harness import WORKER_ENVIRONMENT, Pools

# Before torch: the plain references computed here must use the kernels that the ranks use.
os.environ.update(WORKER_ENVIRONMENT)

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.quick import choices, is_quick
from tests.thorough import is_thorough

torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, files without a quick test are not even imported: that takes as long as some tests."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return choices(collection_path) is None or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
        if is_thorough(item):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world)` is the session's pool of that size."""
    with contextlib.closing(Pools()) as pools:
        yield pools
