"""A pipeline schedule as data: for each rank the list of actions it does, in order.

[Note: the actions]
Stages are numbered along the model: stage 0 sees the input, the last stage computes the loss. An action is
written as stage, kind, microbatch: `2F0` is the forward of stage 2 on microbatch 0.

    F   forward                                  needs F of the stage before
    I   gradient of the stage's input            needs its own F, and I or B of the stage after
    W   gradients of the stage's weights         needs its own I; reads no weights
    B   I and W at once                          needs what I needs

A generator makes these four; lowering passes add the rest:

    1SEND_F2  stage 1 sends its output of microbatch 2 to stage 2, which does 2RECV_F2
    2SEND_B2  stage 2 sends the gradient of its input of microbatch 2 to stage 1, which does 1RECV_B2
    1GATHER   the weights of stage 1 come into memory      1DROP    they leave it
    1REDUCE   the weight gradients of stage 1 are complete for this step

Neighbouring stages on one rank hand over in memory: there is no send between them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from retrograde.errors import ScheduleError


class ActionKind(Enum):
    """What an action does; see [Note: the actions]."""

    F = "F"
    I = "I"  # noqa: E741  the literature's letter
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "GATHER"
    DROP = "DROP"
    REDUCE = "REDUCE"

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE

    @property
    def is_transfer(self) -> bool:
        return self in TRANSFER

    @property
    def per_microbatch(self) -> bool:
        return self in COMPUTE or self in TRANSFER


COMPUTE = frozenset({ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B})
TRANSFER = frozenset({ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B})
BACKWARD = frozenset({ActionKind.I, ActionKind.B})  # what makes the gradient that the stage before waits for

_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_KINDS = {kind.value: kind for kind in ActionKind}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does. GATHER, DROP and REDUCE have no microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.kind.per_microbatch == (self.microbatch is None):
            rule = "needs a microbatch" if self.kind.per_microbatch else "has no microbatch"
            raise ScheduleError(f"action {self}: {self.kind.value} {rule}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Action":
        match = _ACTION.fullmatch(text)
        if match is None or match[2] not in _KINDS:
            raise ScheduleError(
                f"{text!r} is not an action; write stage, kind, microbatch, for example 2F0, 0I3, 1SEND_F2 or 1GATHER "
                f"(kinds: {', '.join(_KINDS)})"
            )
        return Action(_KINDS[match[2]], int(match[1]), int(match[3]) if match[3] else None)


class Place(NamedTuple):
    """Where an action stands: the rank and the position in its list."""

    rank: int
    position: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lists of actions of all ranks: `ranks[rank]`. `placement[stage]` is the rank that holds the stage."""

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def last_stage(self) -> int:
        return len(self.placement) - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)

    def split_microbatches(self, stage: int) -> frozenset[int]:
        """The microbatches whose backward the stage does in two parts, I and W."""
        own = self.ranks[self.placement[stage]]
        return frozenset(a.microbatch or 0 for a in own if a.stage == stage and a.kind is ActionKind.I)

    def peer(self, action: Action) -> int:
        """The rank at the other end of a send or a receive."""
        ahead = action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
        return self.placement[action.stage + (1 if ahead else -1)]

    def actions(self) -> Iterator[tuple[Place, Action]]:
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                yield Place(rank, position), action

    def with_ranks(self, ranks: Iterable[Iterable[Action]]) -> "Schedule":
        return Schedule(self.name, self.microbatches, self.placement, tuple(tuple(actions) for actions in ranks))

    def __str__(self) -> str:
        """One line per rank below a header; `Schedule.parse` reads it back."""
        placement = ",".join(map(str, self.placement))
        header = f"schedule {self.name} microbatches={self.microbatches} placement={placement}"
        lines = [f"rank {rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.ranks)]
        return "\n".join([header, *lines]) + "\n"

    @staticmethod
    def parse(text: str) -> "Schedule":
        """Read the text form. Blank lines and lines that start with # are skipped."""
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if _is_content(line)]
        if not lines:
            raise ScheduleError("the text of a schedule is empty; it starts with 'schedule <name> ...'")
        header = _HEADER.fullmatch(lines[0][1].strip())
        if header is None:
            raise ScheduleError(
                f"line {lines[0][0]}: the first line must be 'schedule <name> microbatches=<n> "
                f"placement=<rank of stage 0>,<rank of stage 1>,...', got {lines[0][1].strip()!r}"
            )
        placement = tuple(int(rank) for rank in header[3].split(","))
        ranks = tuple(_parse_rank(number, line, rank) for rank, (number, line) in enumerate(lines[1:]))
        if len(ranks) != max(placement) + 1:
            raise ScheduleError(
                f"line {lines[-1][0]}: the placement names ranks 0 to {max(placement)}, "
                f"but there are {len(ranks)} rank lines"
            )
        return Schedule(header[1], int(header[2]), placement, ranks)


_HEADER = re.compile(r"schedule (\S|\S.*\S) microbatches=(\d+) placement=(\d+(?:,\d+)*)")
_RANK = re.compile(r"\s*rank (\d+):")


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse_rank(number: int, line: str, rank: int) -> tuple[Action, ...]:
    head = _RANK.match(line)
    if head is None or int(head[1]) != rank:
        raise ScheduleError(f"line {number}: expected 'rank {rank}: ...', got {line.strip()[:40]!r}")
    actions = []
    for word in re.finditer(r"\S+", line[head.end() :]):
        try:
            actions.append(Action.parse(word[0]))
        except ScheduleError as error:
            raise ScheduleError(f"line {number}, column {head.end() + word.start() + 1}: {error}") from None
    return tuple(actions)
