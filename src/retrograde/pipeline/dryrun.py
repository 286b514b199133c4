"""Proves before the start that a schedule is complete, in order, and runs to its end on every rank.

A fault raises a `ScheduleError` with the grid of actions, in which its place is marked `>like this<`.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NoReturn

from retrograde.errors import ScheduleError
from retrograde.pipeline.schedule import BACKWARD, Action, ActionKind, Place, Schedule
from retrograde.pipeline.timeline import Costs, StuckRank, Timeline, find_stuck, has_backward, simulate

AROUND = 5  # actions shown before and after a marked one


def dry_run(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Check the schedule, and return the timeline of its actions."""
    check(schedule)
    return simulate(schedule, costs)


def check(schedule: Schedule) -> None:
    """Raise a `ScheduleError` unless the schedule, lowered or not, does all its work and cannot hang.

    A schedule without any backward action is complete with its forwards alone (evaluation).
    """
    _check_places(schedule)
    _check_once(schedule)
    _check_complete(schedule)
    if any(action.kind.is_transfer for _, action in schedule.actions()):
        _check_transfers(schedule)
    stuck = find_stuck(schedule)
    if stuck:
        _fail(schedule, _deadlock(schedule, stuck), {item.place for item in stuck})
    _check_pages(schedule)
    _check_reductions(schedule)


def grid(schedule: Schedule, marked: Collection[Place] = ()) -> str:
    """The ranks' lists of actions as text; if places are marked, only their neighbourhood."""
    low, high = 0, max((len(actions) for actions in schedule.ranks), default=0)
    if marked:
        low = max(0, min(place.position for place in marked) - AROUND)
        high = min(high, max(place.position for place in marked) + AROUND + 1)
    rows = [
        [f">{action}<" if Place(rank, low + i) in marked else str(action) for i, action in enumerate(actions[low:high])]
        for rank, actions in enumerate(schedule.ranks)
    ]
    width = max((len(cell) for row in rows for cell in row), default=0)
    before = "... " if low else ""
    return "\n".join(
        f"rank {rank} | {before}{' '.join(cell.ljust(width) for cell in row)}".rstrip()
        + (" ..." if len(schedule.ranks[rank]) > high else "")
        for rank, row in enumerate(rows)
    )


def _fail(schedule: Schedule, message: str, marked: Collection[Place] = ()) -> NoReturn:
    raise ScheduleError(f"schedule '{schedule.name}' is not valid: {message}\n\n{grid(schedule, marked)}")


def _check_places(schedule: Schedule) -> None:
    if len(schedule.ranks) != len(set(schedule.placement)) or max(schedule.placement) >= len(schedule.ranks):
        _fail(schedule, f"placement {schedule.placement} does not give each of {len(schedule.ranks)} ranks a stage")
    if schedule.microbatches < 1:
        _fail(schedule, f"it has {schedule.microbatches} microbatches; it needs at least one")
    for place, action in schedule.actions():
        if not 0 <= action.stage < schedule.stages:
            _fail(schedule, f"{action} on rank {place.rank}: there are stages 0 to {schedule.last_stage}", {place})
        if action.microbatch is not None and not 0 <= action.microbatch < schedule.microbatches:
            _fail(
                schedule,
                f"{action} on rank {place.rank}: there are microbatches 0 to {schedule.microbatches - 1}",
                {place},
            )
        if schedule.placement[action.stage] != place.rank:
            home = schedule.placement[action.stage]
            _fail(schedule, f"{action} is on rank {place.rank}, but stage {action.stage} is on rank {home}", {place})


def _check_once(schedule: Schedule) -> None:
    seen: dict[Action, Place] = {}
    for place, action in schedule.actions():
        for part in _parts(action):
            if part in seen:
                _fail(schedule, f"{part} is done twice on rank {place.rank}", {seen[part], place})
            seen[part] = place


def _parts(action: Action) -> Iterator[Action]:
    if action.kind is ActionKind.B:
        yield Action(ActionKind.I, action.stage, action.microbatch)
        yield Action(ActionKind.W, action.stage, action.microbatch)
    elif action.kind.per_microbatch:
        yield action


def _check_complete(schedule: Schedule) -> None:
    done = {part for _, action in schedule.actions() for part in _parts(action)}
    kinds = (ActionKind.F, ActionKind.I, ActionKind.W) if has_backward(schedule) else (ActionKind.F,)
    missing = [
        action
        for stage in range(schedule.stages)
        for micro in range(schedule.microbatches)
        for kind in kinds
        if (action := Action(kind, stage, micro)) not in done
    ]
    if missing:
        rank = schedule.placement[missing[0].stage]
        more = f" and {len(missing) - 1} more actions" if len(missing) > 1 else ""
        end = Place(rank, len(schedule.ranks[rank]) - 1)
        _fail(schedule, f"{missing[0]} is missing on rank {rank}{more}", {end} if end.position >= 0 else ())


def _check_transfers(schedule: Schedule) -> None:
    """Check that every message has both ends, and that both ranks of a pair have their messages in one order."""
    lanes: dict[tuple[int, int], list[tuple[Action, Place]]] = {}
    for place, action in schedule.actions():
        if not action.kind.is_transfer:
            continue
        edge = 0 if action.kind in (ActionKind.SEND_B, ActionKind.RECV_F) else schedule.last_stage
        peer = place.rank if action.stage == edge else schedule.peer(action)
        if peer == place.rank:
            _fail(schedule, f"{action} on rank {place.rank} has no other rank to exchange with", {place})
        lanes.setdefault((place.rank, peer), []).append((_message(action), place))
    for (rank, peer), lane in sorted(lanes.items()):
        other = lanes.get((peer, rank), [])
        for number, (message, place) in enumerate(lane):
            if number >= len(other):
                _fail(schedule, f"rank {rank} exchanges {message} with rank {peer}, which does not take part", {place})
            if other[number][0] != message:
                _fail(
                    schedule,
                    f"ranks {rank} and {peer} exchange in another order: message {number} is {message} for rank "
                    f"{rank} and {other[number][0]} for rank {peer}",
                    {place, other[number][1]},
                )


def _message(action: Action) -> Action:
    """The sender's name of a transfer, for both ends."""
    match action.kind:
        case ActionKind.RECV_F:
            return Action(ActionKind.SEND_F, action.stage - 1, action.microbatch)
        case ActionKind.RECV_B:
            return Action(ActionKind.SEND_B, action.stage + 1, action.microbatch)
    return action


def _deadlock(schedule: Schedule, stuck: list[StuckRank]) -> str:
    places = {part: place for place, action in schedule.actions() for part in (action, *_parts(action))}
    waits = []
    for item in stuck:
        rank = item.place.rank
        place = places.get(item.need)
        if place is None:
            where = "which is not in the schedule"
        elif place.rank == rank:
            where = "which stands later on the same rank"
        else:
            where = f"which rank {place.rank} does later than {schedule.ranks[place.rank][_at(stuck, place.rank)]}"
        waits.append(f"rank {rank} waits at {item.action} for {item.need}, {where}")
    return "it would hang: " + "; ".join(waits)


def _at(stuck: list[StuckRank], rank: int) -> int:
    return next(item.place.position for item in stuck if item.place.rank == rank)


def _check_pages(schedule: Schedule) -> None:
    """If the schedule gathers, check that F, I and B have their stage's page and that no GATHER or DROP is in vain."""
    if not any(action.kind is ActionKind.GATHER for _, action in schedule.actions()):
        return
    present: set[int] = set()
    for place, action in schedule.actions():
        if action.kind is ActionKind.GATHER:
            if action.stage in present:
                _fail(schedule, f"{action} on rank {place.rank}: stage {action.stage} is gathered already", {place})
            present.add(action.stage)
        elif action.stage not in present and action.kind in (ActionKind.DROP, ActionKind.F, *BACKWARD):
            _fail(schedule, f"{action} on rank {place.rank}: stage {action.stage} is not gathered", {place})
        elif action.kind is ActionKind.DROP:
            present.remove(action.stage)


def _check_reductions(schedule: Schedule) -> None:
    """If the schedule reduces, check that every stage is reduced once, after its last W or B."""
    counts = Counter(action.stage for _, action in schedule.actions() if action.kind is ActionKind.REDUCE)
    if not counts:
        return
    wrong = [stage for stage in range(schedule.stages) if counts[stage] != 1]
    if wrong:
        _fail(schedule, f"stage {wrong[0]} is reduced {counts[wrong[0]]} times; each stage is reduced once")
    reduced: set[int] = set()
    for place, action in schedule.actions():
        if action.kind is ActionKind.REDUCE:
            reduced.add(action.stage)
        elif action.stage in reduced and action.kind in (ActionKind.W, ActionKind.B):
            _fail(schedule, f"{action} on rank {place.rank} comes after {action.stage}REDUCE", {place})
