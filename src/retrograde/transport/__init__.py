"""How ranks reach each other: one-sided reads of shards, one-sided puts of gradients, meetings."""

from retrograde.transport.connections import Connections
from retrograde.transport.messages import Key, Offers, Reason, Stamp, Use, Uses, Value
from retrograde.transport.one_sided import Position, Reading, Sending, Station

__all__ = [
    "Connections",
    "Key",
    "Offers",
    "Position",
    "Reading",
    "Reason",
    "Sending",
    "Stamp",
    "Station",
    "Use",
    "Uses",
    "Value",
]
