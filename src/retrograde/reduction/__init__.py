"""Unreduced gradients: from a page's node to the shard's `.grad`."""

from retrograde.reduction.exchange import Exchange
from retrograde.reduction.reducer import Reducer

__all__ = ["Exchange", "Reducer"]
