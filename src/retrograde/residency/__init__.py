"""Pages: when a unit's full parameters are in memory, and how code reaches them."""

from retrograde.residency.access import MADE, Leaf, patch, specialize, unpatched
from retrograde.residency.buffers import BufferPool
from retrograde.residency.full import (
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
from retrograde.residency.gate import Gate
from retrograde.residency.pager import Pager
from retrograde.residency.saved import SavedTensors
from retrograde.residency.unit import Unit

__all__ = [
    "MADE",
    "RESHAPES",
    "Aliased",
    "BufferPool",
    "FullTensor",
    "Gate",
    "Leaf",
    "Pager",
    "SavedTensors",
    "Unit",
    "alive",
    "edits",
    "overloads",
    "patch",
    "set_data",
    "set_requires_grad",
    "specialize",
    "unpatched",
    "views",
]
