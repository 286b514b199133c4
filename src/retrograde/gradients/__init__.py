"""Unreduced gradients: from a page's node to the shard's `.grad`."""

from retrograde.gradients.backwards import Backwards
from retrograde.gradients.collective_calls import BackendSum, CallKind, Exchange
from retrograde.gradients.collective_sum import CollectiveSum
from retrograde.gradients.deliveries import Deliveries
from retrograde.gradients.flow import GradientFlow
from retrograde.gradients.graph import UnitGraph
from retrograde.gradients.keys import Keys
from retrograde.gradients.offers import runs_hooks
from retrograde.gradients.pending import PendingGradients
from retrograde.gradients.reducer import Reducer
from retrograde.gradients.replica_calls import ExchangeOfSums
from retrograde.gradients.strategy import OrderedSum, Strategy
from retrograde.gradients.window import Windows

__all__ = [
    "BackendSum",
    "Backwards",
    "CallKind",
    "CollectiveSum",
    "Deliveries",
    "Exchange",
    "ExchangeOfSums",
    "GradientFlow",
    "Keys",
    "OrderedSum",
    "PendingGradients",
    "Reducer",
    "Strategy",
    "UnitGraph",
    "Windows",
    "runs_hooks",
]
