"""Ranks that save or load together: they exchange values, and all raise if one of them fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from retrograde.errors import CheckpointError, RetrogradeError

T = TypeVar("T")


class Together:
    """The ranks of a process group; one process alone if there is none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.world = 1 if self.alone else dist.get_world_size(group)

    def everybody(self, value: T) -> list[T]:
        """The values of all ranks."""
        if self.world == 1:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def agree(self, what: str, value: Callable[[], T]) -> list[T]:
        """The values of all ranks. If making one raises, all ranks raise before any of them goes on.

        Whatever it raises, since users' code runs here too: a state_dict() of theirs, say."""
        mine: Exception | None = None
        found: T | None = None
        try:
            found = value()
        except Exception as error:
            mine = error
        by_rank = self.everybody((None if mine is None else _told(mine), found))
        if mine is not None:
            raise mine
        for rank, (text, _) in enumerate(by_rank):
            if text is not None:
                raise CheckpointError(f"{what} failed on rank {rank}: {text}")
        return [each for _, each in by_rank]  # type: ignore[misc]

    @contextmanager
    def one_fate(self, what: str) -> Iterator[None]:
        """Raise on all ranks, at the end, if the code inside has raised on one of them."""
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        self.agree(what, lambda: _raise(mine))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _told(error: Exception) -> str:
    """What other ranks hear of an error; ours and the system's name their cause, others need their class."""
    return str(error) if isinstance(error, RetrogradeError | OSError) else f"{type(error).__name__}: {error}"
