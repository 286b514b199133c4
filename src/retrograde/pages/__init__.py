"""Pages: when a unit's full parameters are in memory, and how autograd finds them again."""

from retrograde.pages.full_tensor import RESHAPES, Aliased, FullTensor, alive, edits, views
from retrograde.pages.gathering import PageGathering
from retrograde.pages.page import Page, PageState
from retrograde.pages.pager import Pager
from retrograde.pages.pool import BufferPool
from retrograde.pages.saved_tensors import SavedTensors
from retrograde.pages.unit import Coherence, Unit
from retrograde.pages.watched import Watched

__all__ = [
    "RESHAPES",
    "Aliased",
    "BufferPool",
    "Coherence",
    "FullTensor",
    "Page",
    "PageGathering",
    "PageState",
    "Pager",
    "SavedTensors",
    "Unit",
    "Watched",
    "alive",
    "edits",
    "views",
]
