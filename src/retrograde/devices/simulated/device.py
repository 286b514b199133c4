"""A device that does nothing yet: work that is issued to its streams waits in queues until a scheduler runs it.

The host issues the whole program first. It never reads the device's memory, so running work earlier, between two
calls of the host, would be one of the orders that are tried anyway.

Memory handed out by a stream is scribbled over by that stream first (`empty`): a caching allocator hands out what its
stream has freed and may still be using. Whoever writes it from another stream without waiting loses what it wrote.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from retrograde.devices.streams import Event, Stream, Streams

_HERE = str(Path(__file__).parent)


class Site(NamedTuple):
    """A line of code that records an event or waits for one: always (`time` 0), or the `time`-th time it runs."""

    file: str
    line: int
    kind: str
    time: int = 0

    def __str__(self) -> str:
        return f"{self.kind} at {self.file}:{self.line}" + (f", time {self.time}" if self.time else "")


class Recorded(NamedTuple):
    """An event: it has happened when `stream` has come to `place` in its queue."""

    stream: int
    place: int


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of work on a stream."""

    work: Callable[[], object]
    label: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream waits for an event."""

    event: Recorded


@dataclass(frozen=True, slots=True)
class Mark:
    """The place in a queue at which an event was recorded."""


@dataclass(eq=False)
class SimulatedStream(Stream):
    """A stream whose work is done in any order that events leave open."""

    device: "SimulatedDevice"
    name: str
    number: int
    queue: list[Run | Wait | Mark] = field(default_factory=list)

    def run(self, work: Callable[[], object]) -> None:
        file, line = _caller()
        self.queue.append(Run(work, f"{self.name}: {file}:{line}"))

    def record(self) -> Recorded | None:
        if not self.device.obeys("record"):
            return None
        self.queue.append(Mark())
        return Recorded(self.number, len(self.queue))

    def wait(self, event: Event) -> None:
        if self.device.obeys("wait") and isinstance(event, Recorded) and event.stream != self.number:
            self.queue.append(Wait(event))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self.device.memory(numel, dtype)
        self.queue.append(Run(lambda: memory.fill_(math.nan), f"{self.name}: its allocator's memory is quiet"))
        return memory


class SimulatedDevice(Streams):
    """A device whose work waits in queues until a scheduler runs it. `without`: a line of code whose event or wait is
    left out, to see that it is needed."""

    def __init__(self, without: Site | None = None) -> None:
        self.streams: list[SimulatedStream] = []
        self.sites: dict[Site, int] = {}  # how often each has run
        self.tensors: list[torch.Tensor] = []
        self._without = without
        host = torch.device("cpu")  # its memory is the host's; only the order is a device's
        super().__init__(host, self.stream("reducing"), self.stream("fetching"), self.stream("serving"), self._now)
        self._current = self.stream("main")

    def _now(self) -> SimulatedStream:
        return self._current

    def stream(self, name: str) -> SimulatedStream:
        self.streams.append(SimulatedStream(self, name, len(self.streams)))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def memory(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory that is quiet already. It shows NaN until somebody writes it."""
        self.tensors.append(torch.full((numel,), math.nan, dtype=dtype))
        return self.tensors[-1]

    def obeys(self, kind: str) -> bool:
        """Count this call of the line that asks, and say whether it is to be done: `without` is not."""
        site = Site(*_caller(), kind)
        time = self.sites.get(site, 0) + 1
        self.sites[site] = time
        return self._without not in (site, site._replace(time=time))


def _caller() -> tuple[str, int]:
    """The file and the line of the code outside this package that asked for something."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    assert frame is not None
    return Path(frame.f_code.co_filename).name, frame.f_lineno
