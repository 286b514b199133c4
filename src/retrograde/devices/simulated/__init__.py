"""A device for tests: its streams are queues, and every order that events leave open is tried."""

from retrograde.devices.simulated.device import SimulatedDevice, SimulatedStream, Site
from retrograde.devices.simulated.explore import Corrupted, Explored, Stuck, explore, replay, sample

__all__ = [
    "Corrupted",
    "Explored",
    "SimulatedDevice",
    "SimulatedStream",
    "Site",
    "Stuck",
    "explore",
    "replay",
    "sample",
]
