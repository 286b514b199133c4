"""Order on a device: streams and events of an accelerator, of the host, and of the simulated device (simulated/)."""

from retrograde.devices.streams import (
    HAPPENED,
    HOST,
    Event,
    Stream,
    Streams,
    another_stream,
    can_compute,
    device_of,
    streams_of,
)

__all__ = ["HAPPENED", "HOST", "Event", "Stream", "Streams", "another_stream", "can_compute", "device_of", "streams_of"]
