"""How ranks reach each other: one-sided reads of shards, one-sided puts of gradients, meetings, streams."""

from retrograde.comm.mesh import Mesh
from retrograde.comm.station import Key, Kind, Position, Reading, Sending, Stamp, Station
from retrograde.comm.streams import Event, Stream, Streams, streams_of

__all__ = [
    "Event", "Key", "Kind", "Mesh", "Position", "Reading", "Sending", "Stamp", "Station", "Stream", "Streams",
    "streams_of",
]  # fmt: skip
