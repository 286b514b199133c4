"""Reductions by the backend of torch.distributed, and the order in which ranks start them.

[Note: the order of collectives]
A collective needs every rank to call it, and all collectives of a group in one order. Ranks of a free-form backward
come to their gradients in orders of their own. So a rank that has a gradient says so (`ready`), rank 0 waits until all
have said it and decides that it is the next (`start`), and every rank starts it when it next looks.

    rank 0   ready(a) ─────────────┐ all are ready: start(a)    looks: reduce_scatter(a)
    rank 1         ready(a) ───────┴─────────> start(a)         looks: reduce_scatter(a)

Rule 1: what is not started when rank 0 comes to a meeting is never started: the meeting says who has what, and all
        ranks conclude the same from that (gradients/strategy.py). Rank 0 counts the meeting before it says that it
        comes, and its messages arrive in the order in which they were sent: so at the end of a meeting all ranks
        know of the same starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from retrograde.devices import Stream
from retrograde.transport.messages import Key
from retrograde.transport.own_groups import Calls, OwnGroup


class StartOrder:
    """Which reductions all ranks are ready for, in the order in which they start. Not thread-safe by itself."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._ready: dict[Key, set[int]] = {}  # on rank 0: who is ready for what is not started yet
        self._started: list[Key] = []

    def ready(self, key: Key, rank: int, meetings: int) -> list[Key]:
        """On rank 0, which has come to so many meetings: a rank is ready. Returns what can start now."""
        self._ready.setdefault(key, set()).add(rank)
        self._ready = {key: ranks for key, ranks in self._ready.items() if key.meeting >= meetings}  # Rule 1
        complete = [key for key, ranks in self._ready.items() if len(ranks) == self._world]
        for each in complete:
            del self._ready[each]
        return complete

    def start(self, key: Key) -> None:
        self._started.append(key)

    def take_started(self) -> list[Key]:
        started, self._started = self._started, []
        return started


@dataclass(slots=True)
class _Reduction:
    work: dist.Work
    fail: Callable[[str, BaseException], NoReturn]
    calls: Calls
    number: int

    def wait(self, stream: Stream) -> None:
        try:
            stream.run(self.work.wait)  # on an accelerator it is the stream that waits
        except RuntimeError as error:
            self.fail(f"a reduce-scatter of torch.distributed failed: {error}", error)
        self.calls.end(self.number)

    def done(self) -> bool:
        return bool(self.work.is_completed())


class Collectives:
    """A process group of our own: the user's collectives may come between ours in any order."""

    def __init__(self, own: OwnGroup) -> None:
        self._own = own

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, fail: Callable[..., NoReturn]) -> _Reduction:
        calls = self._own.calls
        number = calls.begin()
        work = dist.reduce_scatter_single(own, whole, group=self._own.group, async_op=True)
        assert work is not None
        return _Reduction(work, fail, calls, number)
