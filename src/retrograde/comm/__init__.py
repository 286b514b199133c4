"""How ranks reach each other: one-sided reads of shards, one-sided puts of gradients, meetings, streams."""

from retrograde.comm.mesh import Mesh
from retrograde.comm.messages import Key, Kind, Offers, Stamp, Use, Uses, Value
from retrograde.comm.station import Position, Reading, Sending, Station
from retrograde.comm.streams import Event, Stream, Streams, streams_of

__all__ = [
    "Event", "Key", "Kind", "Mesh", "Offers", "Position", "Reading", "Sending", "Stamp", "Station", "Stream", "Streams",
    "Use", "Uses", "Value", "streams_of",
]  # fmt: skip
