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
from retrograde.transport.mapped.arena import PeerArena
from retrograde.transport.messages import Message, SharedPlace


@contextlib.contextmanager
def delayed(seed: int, longest: float = 0.002, chance: float = 0.5) -> Iterator[None]:
    """In this process, while inside: at random, the main thread pauses before it sends, and what comes from one rank is
    left lying while what comes from others is taken in. Messages of one rank keep their order, as they always do. In
    shared memory, it pauses before it leaves a letter, and before it reads."""
    dice = random.Random(seed)
    send, receive, post, view = Connections.send, Line.receive, Connections.post, PeerArena.view

    def slow_send(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> int:
        pause()
        return send(self, dst, message, data)

    def slow_receive(self: Line) -> None:
        if dice.random() < chance:
            time.sleep(dice.random() * longest)
            return  # the selector says again that there is something to read
        receive(self)

    def pause() -> None:
        if threading.current_thread() is threading.main_thread() and dice.random() < chance:
            time.sleep(dice.random() * longest)

    def slow_post(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> bool:
        pause()
        return post(self, dst, message, data)

    def slow_view(self: PeerArena, place: SharedPlace, numel: int, dtype: torch.dtype) -> torch.Tensor:
        pause()
        return view(self, place, numel, dtype)

    Connections.send, Line.receive = slow_send, slow_receive  # type: ignore[method-assign]
    Connections.post, PeerArena.view = slow_post, slow_view  # type: ignore[method-assign]
    try:
        yield
    finally:
        Connections.send, Line.receive = send, receive  # type: ignore[method-assign]
        Connections.post, PeerArena.view = post, view  # type: ignore[method-assign]
