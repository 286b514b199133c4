"""From how many bytes on a gradient lies elsewhere than in its bucket: models of tests are smaller than that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from retrograde.gradients import bucket


@contextlib.contextmanager
def passed_through(least: int) -> Iterator[None]:
    """Gradients that are sent at once, of so many bytes, are sent from where they are."""
    with mock.patch.object(bucket, "HUGE", least):
        yield


@contextlib.contextmanager
def kept(least: int) -> Iterator[None]:
    """Gradients that wait, of so many bytes, wait where they are, if nobody else has them."""
    with mock.patch.object(bucket, "LARGE", least):
        yield
