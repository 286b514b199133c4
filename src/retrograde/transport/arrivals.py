"""What comes from one rank, delivered in the order in which it was sent.

Messages come by one wire and the bytes of large tensors by another (wires.py). Each keeps its order. A message whose
bytes are still to come holds up those behind it:

    control   Meet   Put (8 MiB apart)   Goodbye
    bulk             2 MiB   2 MiB   2 MiB   2 MiB
    delivered Meet ................................ Put   Goodbye
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from retrograde.transport.envelope import Opened, bytes_of, opened
from retrograde.transport.messages import Message, MessageError

_CROWD = 16  # chunks that wait for their message


class Reader(Protocol):
    """Takes what has come from other ranks."""

    @property
    def changed(self) -> threading.Condition:
        """The condition that is held while something is delivered. After that nothing of it is kept here, since whoever
        waits for it may count references to a page."""

    def destination(self, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
        """The memory into which the tensors of a message are received, exactly as many bytes as will come;
        None if nobody wants them."""

    def deliver(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None:
        """Take a message with its tensors. `changed` is held."""


class _Filling:
    """A message whose tensors are being received."""

    def __init__(self, message: Message, nbytes: int, data: Sequence[torch.Tensor] | None) -> None:
        self.message = message
        self.data = () if data is None else data
        self.missing = nbytes
        self._into = deque(bytes_of(tensor) for tensor in self.data if tensor.numel())

    def take(self, chunk: memoryview) -> None:
        if not 0 < len(chunk) <= self.missing:
            raise MessageError(f"{len(chunk)} bytes of tensors came where {self.missing} were to come")
        self.missing -= len(chunk)
        while self._into and len(chunk):  # without memory for them, nobody wants them
            part = min(len(chunk), len(self._into[0]))
            self._into[0][:part] = chunk[:part]
            chunk, rest = chunk[part:], self._into.popleft()[part:]
            if len(rest):
                self._into.appendleft(rest)


class Arrivals:
    """Puts together what comes from one rank by wires, and delivers it. Not thread-safe: only the service thread uses
    it. (A letter comes whole: `take_whole`.)"""

    def __init__(self, src: int, reader: Reader) -> None:
        self._src = src
        self._reader = reader
        self._messages: deque[Opened] = deque()
        self._chunks: deque[memoryview] = deque()
        self._filling: _Filling | None = None

    def take_message(self, envelope: memoryview) -> None:
        self._messages.append(opened(envelope))
        self._go_on()

    def take_chunk(self, chunk: memoryview) -> None:
        self._chunks.append(chunk)
        self._go_on()

    @property
    def crowded(self) -> bool:
        """Have many bytes come whose message has not? That is on its way, by the other wire."""
        return len(self._chunks) > _CROWD

    def _go_on(self) -> None:
        while self._fill() and self._messages:
            waiting = self._messages.popleft()
            if waiting.comes_apart:
                self._filling = _filling(self._src, waiting, self._reader)
            else:
                take_whole(self._src, waiting, self._reader)

    def _fill(self) -> bool:
        """Fill the tensors of the message that is being received. Returns whether the next message has its turn."""
        while self._filling is not None and self._chunks:
            self._filling.take(self._chunks.popleft())
            if not self._filling.missing:
                complete, self._filling = self._filling, None
                with self._reader.changed:
                    self._reader.deliver(self._src, complete.message, complete.data)
                    del complete
        return self._filling is None


def _filling(src: int, came: Opened, reader: Reader) -> _Filling:
    return _Filling(came.message, came.nbytes, reader.destination(src, came.message, came.nbytes))


def take_whole(src: int, came: Opened, reader: Reader) -> None:
    """Deliver a message that has come with all its bytes."""
    if came.comes_apart:
        raise MessageError(f"{came.nbytes} bytes of tensors are missing from a {type(came.message).__name__}")
    whole = _filling(src, came, reader)
    if came.nbytes:
        whole.take(came.data)
    with reader.changed:
        reader.deliver(src, came.message, whole.data)
        del whole
