"""The door to other ranks (protocol.py), and what stands behind it: connections of processes, threads, a fake."""

from retrograde.transport.fake import FakeRanks
from retrograde.transport.messages import Key, Offers, Reason, Stamp, Use, Uses, Value
from retrograde.transport.processes import ProcessRanks
from retrograde.transport.protocol import (
    Channel,
    CourtesySum,
    GradientWant,
    Incoming,
    Memory,
    OrderedTransport,
    Parts,
    PipelineRanks,
    Position,
    Ranks,
    ReplicaExchange,
    Rest,
    ShardServer,
    Transport,
    Way,
    Work,
)
from retrograde.transport.threads import ThreadRanks

__all__ = [
    "Channel",
    "CourtesySum",
    "FakeRanks",
    "GradientWant",
    "Incoming",
    "Key",
    "Memory",
    "Offers",
    "OrderedTransport",
    "Parts",
    "PipelineRanks",
    "Position",
    "ProcessRanks",
    "Ranks",
    "Reason",
    "ReplicaExchange",
    "Rest",
    "ShardServer",
    "Stamp",
    "ThreadRanks",
    "Transport",
    "Use",
    "Uses",
    "Value",
    "Way",
    "Work",
]
