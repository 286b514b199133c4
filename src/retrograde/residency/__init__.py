"""Pages: when a unit's full parameters are in memory, and how code reaches them."""

from retrograde.residency.access import MADE, Leaf, patch, specialize
from retrograde.residency.buffers import BufferPool
from retrograde.residency.full import alive, edits, overloads
from retrograde.residency.gate import Gate, Phase
from retrograde.residency.pager import Pager
from retrograde.residency.saved import SavedTensors
from retrograde.residency.unit import Sink, Unit

__all__ = [
    "MADE", "BufferPool", "Gate", "Leaf", "Pager", "Phase", "SavedTensors", "Sink", "Unit", "alive", "edits",
    "overloads", "patch", "specialize",
]  # fmt: skip
