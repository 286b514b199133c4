"""When ranks meet and what they conclude from it; who may write weights, and when."""

from retrograde.coordination.coordinator import Coordinator
from retrograde.coordination.fences import WriteFence

__all__ = ["Coordinator", "WriteFence"]
