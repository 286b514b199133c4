"""Unreduced gradients: from a page's node to the shard's `.grad`."""

from retrograde.reduction.council import Council, Offers
from retrograde.reduction.exchange import Exchange
from retrograde.reduction.reducer import Reducer

__all__ = ["Council", "Exchange", "Offers", "Reducer"]
