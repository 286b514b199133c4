"""What the harness and a rank say to each other over a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Work = TypeVar("Work")


@dataclass(frozen=True)
class Seat(Generic[Work]):
    """Where a rank sits: everything a new process needs to become a contender's rank."""

    contender: str
    work: Work
    rank: int
    world: int
    port: int
    log: str
    harness: int  # process id
    patience: float  # seconds a collective may wait for the other ranks


@dataclass(frozen=True)
class Turn:
    """Run `settle` steps that are not timed, then `steps` that are."""

    steps: int
    settle: int


@dataclass(frozen=True)
class Count:
    """Run one step and count its collectives."""


@dataclass(frozen=True)
class Close:
    """Leave the process group and end."""


@dataclass(frozen=True)
class Ready:
    parameters: int
    base_rss: int  # resident bytes before the model exists
    setup_peak: int


@dataclass(frozen=True)
class TurnTaken:
    seconds: tuple[float, ...]
    losses: tuple[float, ...]  # of the settling steps too
    sent_bytes_per_step: float
    cpu_seconds: float
    idle_cpu_seconds: float  # spent since the last turn, when the rank should have been asleep
    idle_seconds: float
    peak_rss: int


@dataclass(frozen=True)
class Counted:
    calls: dict[str, int]  # of torch.distributed
    exchanges: dict[str, int]  # as the engine itself counts them, if it does


@dataclass(frozen=True)
class Closed:
    pass


@dataclass(frozen=True)
class Failed:
    error: str
