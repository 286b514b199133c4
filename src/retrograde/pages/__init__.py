"""Pages: when a unit's full parameters are in memory, and how code reaches them."""

from retrograde.pages.full_tensor import (
    RESHAPES,
    Aliased,
    FullTensor,
    alive,
    edits,
    overloads,
    set_data,
    set_requires_grad,
    views,
)
from retrograde.pages.gate import Gate
from retrograde.pages.pager import Pager
from retrograde.pages.pool import BufferPool
from retrograde.pages.saved_tensors import SavedTensors
from retrograde.pages.unit import Unit

__all__ = [
    "RESHAPES",
    "Aliased",
    "BufferPool",
    "FullTensor",
    "Gate",
    "Pager",
    "SavedTensors",
    "Unit",
    "alive",
    "edits",
    "overloads",
    "set_data",
    "set_requires_grad",
    "views",
]
