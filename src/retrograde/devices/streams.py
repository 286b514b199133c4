"""Order on a device: what may start on one stream before what on another is done.

[Note: producers]
An accelerator runs streams side by side; the host only issues work. Whoever hands memory from one stream to another
says so with an event. Memory that is written and read here belongs to pages and to buckets:

Rule 1: a producer's stream waits until the storage is free, writes its part, and records an event after it. So it
        does for a gradient that is too large to copy and is sent from where autograd left it.
Rule 2: the reducing stream waits for the event of every producer.
Rule 3: storage is given back with the event of its last reader, and its next writers wait for that event. A gradient
        that was not copied is let go when its producer's stream has been made to wait for the reduction.
Rule 4: whoever uses a reduced gradient or a page waits for the stream that made it; the stream that makes it
        waits for what the user's stream has issued until then, such as the step that wrote the shard.

A stream runs pieces of work (`run`), records events and waits for them, and has memory of its own (`empty`). Work
only reads and writes memory that exists already, so that a device may do it later: the host returns at once, and
on the simulated device (retrograde/devices/simulated) in any order that the events leave open.
"""

from collections.abc import Callable
from typing import Any

import torch

Event = Any  # what `record` gives and `wait` takes: opaque to everybody else


class Stream:
    """A stream of a device. This one is the host's: work is done when it is issued, so nothing has to wait."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


class Streams:
    """The streams of one device: two of ours, and the one that code runs on now."""

    def __init__(self, reducing: Stream, fetching: Stream, current: Callable[[], Stream] | None = None) -> None:
        """Without `current`, code runs on the reducing stream: on the host they are all the same."""
        self.reducing = reducing
        self.fetching = fetching
        self.current = current or (lambda: reducing)


class DeviceStream(Stream):
    """A stream of an accelerator."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)

    def run(self, work: Callable[[], object]) -> None:
        with self._stream:
            work()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self._stream:
            return torch.empty(numel, dtype=dtype, device=self._stream.device)


def streams_of(device: torch.device) -> Streams:
    if device.type == "cpu":
        return Streams(Stream(), Stream())
    reducing = DeviceStream(torch.Stream(device))
    fetching = DeviceStream(torch.Stream(device))
    return Streams(reducing, fetching, lambda: DeviceStream(torch.accelerator.current_stream()))
