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
    """Who takes what has come."""

    @property
    def changed(self) -> threading.Condition:
        """Held while something is delivered. Nothing of it is kept here after that: who waits for it may count
        references to a page."""

    def destination(self, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
        """Where the tensors of a message belong, if anybody wants them: exactly as many bytes as will come."""

    def deliver(self, src: int, message: Message, data: Sequence[torch.Tensor]) -> None:
        """With `changed` held."""


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
    """Not thread-safe: what comes by wires is the service thread's, and a letter is whole."""

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
        """Have many bytes come whose message has not? It is on its way, by the other wire."""
        return len(self._chunks) > _CROWD

    def _go_on(self) -> None:
        while self._fill() and self._messages:
            waiting = self._messages.popleft()
            if waiting.comes_apart:
                self._filling = _filling(self._src, waiting, self._reader)
            else:
                take_whole(self._src, waiting, self._reader)

    def _fill(self) -> bool:
        """Says whether the next message has its turn."""
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
    """A message with all its bytes."""
    if came.comes_apart:
        raise MessageError(f"{came.nbytes} bytes of tensors are missing from a {type(came.message).__name__}")
    whole = _filling(src, came, reader)
    if came.nbytes:
        whole.take(came.data)
    with reader.changed:
        reader.deliver(src, came.message, whole.data)
        del whole
