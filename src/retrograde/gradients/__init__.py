"""Unreduced gradients: from a page's node to the shard's `.grad`."""

from retrograde.gradients.exchange import Exchange
from retrograde.gradients.flow import Reducer

__all__ = ["Exchange", "Reducer"]
