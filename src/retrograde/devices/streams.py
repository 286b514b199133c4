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
Rule 5: memory is allocated on the stream to which it will be free again: what users keep on theirs. Where that would
        make a transfer wait for what users compute, it is the transfer's, and each user's stream holds it (`hold`).

A stream runs pieces of work (`run`), records events and waits for them, and has memory of its own (`empty`). Work
only reads and writes memory that exists already, so that a device may do it later: the host returns at once, and
on the simulated device (devices/simulated) in any order that the events leave open. Only `to_host` and `finish` make
the host wait.

[Note: crossing]
With offload (layout/offload.py) leaves are in the host's memory and pages on the device. So gradients come to the host
and weights go to the device, by copies that streams do while the host goes on:

    device   sum of a gradient ── returning ──┐                  ┌── fetching ──> source, or page
                                              v                  │
    host                                   .grad ── update ──> leaf

Rule 1: what crosses lies in pinned memory on the host's side. Otherwise the host would wait for each copy.
Rule 2: before the host reads what has come, or writes what may still be read, it waits for all copies that were
        noted since it last did. So in a step of training it waits once: when the optimizer is about to update, or
        when somebody looks at gradients before that. Who only looks at gradients waits for no copy to the device.
Rule 3: the sum of a gradient that goes to the host lies in memory of the returning stream, the last to read it.
Rule 4: where somebody has got a piece of a leaf's memory as a plain tensor (`p.local`), nobody knows when he writes
        to it. From then on every copy is waited for at once.
"""

from collections.abc import Callable, Iterable
from typing import cast

import torch

from retrograde.devices.host_memory import host_empty
from retrograde.errors import UnsupportedError

Event = object  # what `record` gives and `wait` takes: opaque to everybody else

HOST = torch.device("cpu")
HAPPENED: Event = object()  # the event of work that was done when it was issued


class Stream:
    """A stream of a device. This one is the host's: work is done when it is issued, so nothing has to wait."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> Event:
        return HAPPENED

    def wait(self, event: Event) -> None:
        pass

    def has_passed(self, event: Event) -> bool:
        """Has this event happened, which was recorded here? The host does not wait."""
        return True

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return host_empty(numel, dtype)

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold memory of another stream:
        whoever lets go of it need not wait for what has been issued here until then."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the host can read it, with what was issued here before. The host waits for that."""
        return tensor

    def finish(self) -> None:
        """Make the host wait for what was issued here before."""

    @property
    def capturing(self) -> bool:
        """Is what is issued here recorded into a graph, to be played again without us?"""
        return False


class Crossing:
    """The copies of one model between the host's memory and a device's.
    Where everything is in the host's memory there are none."""

    def __init__(self, returning: Stream) -> None:
        self.returning = returning
        self._noted: dict[Stream, Event] = {}
        self._at_once = False

    @staticmethod
    def pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that streams can copy from and to."""
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=True)

    def note(self, stream: Stream) -> None:
        """Note that what was issued there last reads or writes the host's memory."""
        self._noted[stream] = stream.record()
        if self._at_once:
            self.wait_for_copies()

    def wait_for_copies(self) -> None:
        """Make the host wait for what has been noted (Rule 2)."""
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        for stream, event in noted.items():
            if stream is not self.returning:
                self.returning.wait(event)
        self.returning.finish()

    def await_returned(self) -> None:
        """Make the host wait for what has been noted (Rule 2) if it is about to touch only what comes to it, and
        something is coming."""
        if self.returning in self._noted:
            self.wait_for_copies()

    def wait_at_once(self) -> None:
        """Wait for each copy at once from now on (Rule 4)."""
        self._at_once = True
        self.wait_for_copies()


class Streams:
    """The streams of one device: three of ours, and the one that code runs on now.

    `serving` reads shards for other ranks, at the hands of any thread. `crossing`: copies between host and device."""

    def __init__(
        self,
        device: torch.device,
        reducing: Stream,
        fetching: Stream,
        serving: Stream,
        current: Callable[[], Stream],
        returning: Stream | None = None,
        overlap: bool = True,
    ) -> None:
        """`returning`: the stream on which copies to the host go, where there is a device. `overlap`: may what we issue
        run beside what the user does? If not, ours are the user's own, and calls in the order of collectives, on
        streams of their process group, are waited for as soon as they have been issued."""
        self.device = device
        self.on_host = device.type == "cpu"
        self.overlap = overlap
        self.reducing = reducing
        self.fetching = fetching
        self.serving = serving
        self.current = current
        self.crossing = Crossing(returning or Stream())

    def refuse_capture(self, what: str, *names: str) -> None:
        """Refuse to go on while a graph is captured. A graph has the kernels of one stream, and addresses of memory.
        Which page is fetched when, on which stream, who meets whom: all that is decided by the host, and would not be
        played again.

        `names` take the places `{}` in `what`, when it raises: this is asked all the time, and almost never raises."""
        if self.current().capturing:
            raise UnsupportedError(
                f"{what.format(*names)} while the current stream of {self.device} is being captured into a graph: when "
                f"the graph is replayed, nothing would be fetched, reduced or agreed on. Leave what uses sharded "
                f"weights out of the graph, and capture what lies between, functions of plain tensors"
            )

    def empty_for_user(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the reducing stream writes and that then is the user's: of the current stream, to which it
        returns in the end."""
        current = self.current()
        memory = current.empty(numel, dtype)
        self.reducing.wait(current.record())  # what had the memory before
        return memory

    def empty_for_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the reducing stream writes and that is then copied to the host ([Note: crossing], Rule 3)."""
        returning = self.crossing.returning
        memory = returning.empty(numel, dtype)
        self.reducing.wait(returning.record())  # what had the memory before
        return memory


class DeviceStream(Stream):
    """A stream of an accelerator."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        if event is not HAPPENED:
            self._stream.wait_event(cast(torch.Event, event))  # which another stream of this device gave

    def has_passed(self, event: Event) -> bool:
        return event is HAPPENED or cast(torch.Event, event).query()

    def run(self, work: Callable[[], object]) -> None:
        with self._stream:
            work()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self._stream:
            return torch.empty(numel, dtype=dtype, device=self._stream.device)

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor  # of a model that is offloaded
        with self._stream:
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
            copied.copy_(tensor, non_blocking=True)
        self.finish()
        return copied

    def finish(self) -> None:
        self._stream.record_event().synchronize()

    @property
    def capturing(self) -> bool:
        return self._stream.is_capturing()


def streams_of(device: torch.device, overlap: bool = True) -> Streams:
    """The streams of a device: the host's own, or those of an accelerator.

    Without `overlap` those that fetch and reduce are the stream that is current now. Whoever uses another one later
    still waits for it, and is waited for, by events. What is read for other ranks is not ours to delay: behind a call
    of the process group, which waits for a rank, it would wait for the rank that reads."""
    if device.type == "cpu":
        host = Stream()
        return Streams(device, host, host, host, lambda: host)

    def current() -> Stream:
        return DeviceStream(torch.accelerator.current_stream(device))

    serving = DeviceStream(torch.Stream(device))
    if not overlap:
        only = current()
        return Streams(device, only, only, serving, current, only, overlap)
    reducing, fetching, returning = (DeviceStream(torch.Stream(device)) for _ in range(3))
    return Streams(device, reducing, fetching, serving, current, returning)


def another_stream(device: torch.device) -> Stream:
    """A new stream of an accelerator; the host has one."""
    return Stream() if device.type == "cpu" else DeviceStream(torch.Stream(device))


def device_of(tensors: Iterable[torch.Tensor], otherwise: torch.device = HOST) -> torch.device:
    """Where a model lives: on its first parameter's device. `otherwise`: if all of it is on the meta device."""
    real = (tensor.device for tensor in tensors if tensor.device.type != "meta")
    return next(real, otherwise)


def can_compute(device: torch.device) -> bool:
    """Is this device the host, or of this process's kind of accelerator?"""
    accelerator = torch.accelerator.current_accelerator()
    return device.type == "cpu" or (accelerator is not None and accelerator.type == device.type)
