"""Pages: when a unit's full parameters are in memory, and how code reaches them."""

from retrograde.residency.access import Leaf, patch
from retrograde.residency.buffers import BufferPool
from retrograde.residency.full import alive, edits, overloads, set_data, set_requires_grad
from retrograde.residency.gate import Gate
from retrograde.residency.pager import Pager
from retrograde.residency.saved import SavedTensors
from retrograde.residency.unit import Sink, Unit

__all__ = [
    "BufferPool", "Gate", "Leaf", "Pager", "SavedTensors", "Sink", "Unit", "alive", "edits", "overloads",
    "patch", "set_data", "set_requires_grad",
]  # fmt: skip
