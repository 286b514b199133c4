"""Order on a device: streams and events of an accelerator, of the host, and of the simulated device (simulated/)."""

from retrograde.devices.streams import Event, Stream, Streams, device_of, streams_of

__all__ = ["Event", "Stream", "Streams", "device_of", "streams_of"]
