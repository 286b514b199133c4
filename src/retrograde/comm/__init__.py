"""How ranks reach each other: one-sided reads of shards, one-sided puts of gradients, and meetings."""

from retrograde.comm.mesh import Mesh
from retrograde.comm.station import Key, Kind, Position, Reading, Stamp, Station, Turn

__all__ = ["Key", "Kind", "Mesh", "Position", "Reading", "Stamp", "Station", "Turn"]
