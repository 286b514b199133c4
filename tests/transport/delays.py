"""Messages that take their time: for tests that want other interleavings than those of an idle machine."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from retrograde.transport.connections import Connections
from retrograde.transport.line import Line
from retrograde.transport.messages import Message


@contextlib.contextmanager
def delayed(seed: int, longest: float = 0.002, chance: float = 0.5) -> Iterator[None]:
    """In this process, while inside: at random, the main thread pauses before it sends, and what comes from one rank is
    left lying while what comes from others is taken in. Messages of one rank keep their order, as they always do."""
    dice = random.Random(seed)
    send, receive = Connections.send, Line.receive

    def slow_send(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> int:
        if threading.current_thread() is threading.main_thread() and dice.random() < chance:
            time.sleep(dice.random() * longest)
        return send(self, dst, message, data)

    def slow_receive(self: Line) -> None:
        if dice.random() < chance:
            time.sleep(dice.random() * longest)
            return  # the selector says again that there is something to read
        receive(self)

    Connections.send, Line.receive = slow_send, slow_receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        Connections.send, Line.receive = send, receive  # type: ignore[method-assign]
