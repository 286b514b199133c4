"""All rows of the matrix, by theme. Importing this registers them."""

from tests.patterns import (
    rows_backward,
    rows_extra,
    rows_leaves,
    rows_model,
    rows_offload,
    rows_precision,
    rows_ranks,
)
from tests.patterns.registry import CASES

__all__ = [
    "CASES",
    "rows_backward",
    "rows_extra",
    "rows_leaves",
    "rows_model",
    "rows_offload",
    "rows_precision",
    "rows_ranks",
]
