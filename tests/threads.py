"""Ranks that are threads of this process: for what needs ranks and no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch._dynamo  # noqa: F401 - torch imports it with the first optimizer, and two threads that import it deadlock

from retrograde.transport import ThreadRanks
from retrograde.transport.threads import ThreadGroup

T = TypeVar("T")


def run(world: int, program: Callable[[ThreadRanks], T], timeout: float = 60.0) -> list[T]:
    """`program` on every rank; what each returned. What one raises is raised here."""
    group = ThreadGroup(world)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def rank(number: int) -> None:
        try:
            results[number] = program(group.rank(number))
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    late = [number for number, thread in enumerate(threads) if thread.is_alive()]
    assert not late, f"ranks {late} have not ended after {timeout} s"
    for number in sorted(errors):
        raise errors[number]
    return [results[number] for number in range(world)]
