"""Small models whose pages are mappings: so are otherwise only those of shards that are worth it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from retrograde.layout import flat


@contextlib.contextmanager
def everything_mapped() -> Iterator[None]:
    """For models that are sharded inside."""
    kept = flat.WORTH_MAPPING
    flat.WORTH_MAPPING = 1
    try:
        yield
    finally:
        flat.WORTH_MAPPING = kept
