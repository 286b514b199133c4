"""Messages that take their time: for tests that want other interleavings than those of an idle machine."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from retrograde.transport.connections import Connections
from retrograde.transport.mapped.arena import PeerArena
from retrograde.transport.mapped.mirror import ArenaMirror
from retrograde.transport.messages import Message, SharedPlace, Stamp
from retrograde.transport.wires import Came, Lost, Sending, Wires


class _SlowWires:
    """What comes from one rank is left lying at random, while what comes from others is taken in."""

    def __init__(self, dice: random.Random, longest: float, chance: float) -> None:
        self._dice, self._longest, self._chance = dice, longest, chance
        self._real = Wires.wait
        self._left_lying: dict[Wires, list[Came]] = {}
        self._deciding = threading.Lock()

    def wait(self, wires: Wires, seconds: float | None, bulk: bool = True) -> list[Came | Lost]:
        lying = self._left_lying.get(wires, [])
        came = [*lying, *self._real(wires, self._dice.random() * self._longest if lying else seconds, bulk)]
        with self._deciding:
            senders = sorted({event.src for event in came if isinstance(event, Came)})
            slow = self._dice.choice(senders) if senders and self._dice.random() < self._chance else None
            self._left_lying[wires] = [event for event in came if isinstance(event, Came) and event.src == slow]
        return [event for event in came if not (isinstance(event, Came) and event.src == slow)]

    def finish(self) -> None:
        """Nothing is left lying any more."""
        with self._deciding:
            self._chance = 0.0
        while any(self._left_lying.values()):
            time.sleep(self._longest)


@contextlib.contextmanager
def _slow_memory(pause: Callable[[], None]) -> Iterator[None]:
    """Shared memory that is looked at late, and kept late."""
    view, show, keep = PeerArena.view, ArenaMirror.show, ArenaMirror.keep

    def slow_view(self: PeerArena, place: SharedPlace, numel: int, dtype: torch.dtype) -> torch.Tensor:
        pause()
        return view(self, place, numel, dtype)

    def slow_show(self: ArenaMirror, owner: int, stamp: Stamp) -> bool:
        pause()
        return show(self, owner, stamp)

    def slow_keep(self: ArenaMirror) -> None:
        pause()
        keep(self)

    PeerArena.view = slow_view  # type: ignore[method-assign]
    ArenaMirror.show, ArenaMirror.keep = slow_show, slow_keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        PeerArena.view, ArenaMirror.show, ArenaMirror.keep = view, show, keep  # type: ignore[method-assign]


@contextlib.contextmanager
def delayed(seed: int, longest: float = 0.002, chance: float = 0.5) -> Iterator[None]:
    """In this process, while inside: at random, the main thread pauses before it sends, and what comes from one rank is
    left lying while what comes from others is taken in. Messages of one rank keep their order, as they always do. In
    shared memory, it pauses before it leaves a letter, before it reads, and before it shows or keeps a shard."""
    dice = random.Random(seed)
    send, wait, post = Connections.send, Wires.wait, Connections.post
    slow = _SlowWires(dice, longest, chance)

    def slow_send(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> Sending:
        pause()
        return send(self, dst, message, data)

    def slow_wait(self: Wires, seconds: float | None, bulk: bool = True) -> list[Came | Lost]:
        return slow.wait(self, seconds, bulk)

    def pause() -> None:
        if threading.current_thread() is threading.main_thread() and dice.random() < chance:
            time.sleep(dice.random() * longest)

    def slow_post(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> bool:
        pause()
        return post(self, dst, message, data)

    Connections.send, Wires.wait, Connections.post = slow_send, slow_wait, slow_post  # type: ignore[method-assign]
    try:
        with _slow_memory(pause):
            yield
    finally:
        slow.finish()
        Connections.send, Wires.wait, Connections.post = send, wait, post  # type: ignore[method-assign]
