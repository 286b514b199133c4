"""Pages: when a unit's full parameters are in memory, and how code reaches them."""

from retrograde.residency.access import announce, patch, tend
from retrograde.residency.buffers import BufferPool
from retrograde.residency.full import edits
from retrograde.residency.gate import Gate, Phase
from retrograde.residency.pager import Pager
from retrograde.residency.saved import SavedTensors
from retrograde.residency.unit import Sink, Unit

__all__ = [
    "BufferPool", "Gate", "Pager", "Phase", "SavedTensors", "Sink", "Unit", "announce", "edits", "patch", "tend"
]  # fmt: skip
