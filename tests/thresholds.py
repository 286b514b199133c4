"""From how many bytes on a gradient lies elsewhere than in its bucket: models of tests are smaller than that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from retrograde.gradients import bucket


@contextlib.contextmanager
def kept(least: int) -> Iterator[None]:
    """Gradients of so many bytes stay where they are, if nobody else has them."""
    with mock.patch.object(bucket, "LARGE", least):
        yield
