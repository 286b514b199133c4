"""Unreduced gradients: from a page's node to the shard's `.grad`."""

from retrograde.gradients.collective_sum import CollectiveSum
from retrograde.gradients.flow import GradientFlow
from retrograde.gradients.graph import UnitGraph
from retrograde.gradients.strategy import OrderedSum, Strategy

__all__ = ["CollectiveSum", "GradientFlow", "OrderedSum", "Strategy", "UnitGraph"]
