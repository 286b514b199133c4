"""How ranks reach each other: one-sided reads of shards, one-sided puts of gradients, meetings, streams."""

from retrograde.comm.mesh import Mesh
from retrograde.comm.messages import Key, Kind, Offer, Offers, Part, Stamp, Use, Value
from retrograde.comm.station import Position, Reading, Sending, Station
from retrograde.comm.streams import Event, Stream, Streams, streams_of

__all__ = [
    "Event", "Key", "Kind", "Mesh", "Offer", "Offers", "Part", "Position", "Reading", "Sending", "Stamp", "Station",
    "Stream", "Streams", "Use", "Value", "streams_of",
]  # fmt: skip
