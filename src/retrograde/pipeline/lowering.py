"""Small passes that turn a schedule of computations into all that a rank does.

Each pass adds one kind of actions and keeps the order of the others. `lower` applies them all.
"""

from collections.abc import Iterator
from typing import NamedTuple

from retrograde.errors import ScheduleError
from retrograde.pipeline.schedule import BACKWARD, Action, ActionKind, Schedule
from retrograde.pipeline.timeline import Costs, simulate

USES_WEIGHTS = frozenset({ActionKind.F, *BACKWARD})  # not W, which reads inputs and output gradients only


def lower(schedule: Schedule, *, gathered: int | None = None, costs: Costs | None = None) -> Schedule:
    """Add reductions, page actions if `gathered` is given, and transfers."""
    schedule = add_reductions(schedule)
    if gathered is not None:
        schedule = add_pages(schedule, gathered)
    return add_transfers(schedule, costs)


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forwards alone, for evaluation. They depend on no other actions, so they still run to their end."""
    kept = [[action for action in actions if action.kind is ActionKind.F] for actions in schedule.ranks]
    return schedule.with_ranks(kept)


def add_transfers(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Add sends and receives between stages on different ranks.

    The schedule is played once; when an action ends whose result another rank needs, the send is written on
    this rank and the receive on the other at that same moment. All ranks' lists are then cuts through one order
    of all transfers. So the two ranks of a pair agree on their order, and even sends that wait for their
    receiver cannot wait in a circle. A receive is posted before its data is needed, as soon as it can arrive.
    """
    timeline = simulate(schedule, costs)
    moments: list[tuple[tuple[float, int, int, int], Action]] = []
    for number, item in enumerate(timeline.timed):
        moments.append(((item.start, 1, number, 0), item.action))
        send = _send(schedule, item.action)
        if send is not None:
            # A result is sent before other actions start at the same time, but after the start of its own action.
            moments.append(((item.end, int(item.end == item.start), number, 1), send))
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, action in sorted(moments, key=lambda moment: moment[0]):
        lists[schedule.placement[action.stage]].append(action)
        if action.kind.is_transfer:
            lists[schedule.peer(action)].append(_receive(action))
    return schedule.with_ranks(lists)


def _send(schedule: Schedule, action: Action) -> Action | None:
    if action.kind is ActionKind.F and action.stage < schedule.last_stage:
        send = Action(ActionKind.SEND_F, action.stage, action.microbatch)
    elif action.kind in BACKWARD and action.stage > 0:
        send = Action(ActionKind.SEND_B, action.stage, action.microbatch)
    else:
        return None
    return send if schedule.peer(send) != schedule.placement[action.stage] else None


def _receive(send: Action) -> Action:
    if send.kind is ActionKind.SEND_F:
        return Action(ActionKind.RECV_F, send.stage + 1, send.microbatch)
    return Action(ActionKind.RECV_B, send.stage - 1, send.microbatch)


class _Span(NamedTuple):
    """A stage's weights are in memory from action `first` to action `last` of a rank."""

    stage: int
    first: int
    last: int


def add_pages(schedule: Schedule, gathered: int = 1) -> Schedule:
    """Gather a stage's weights before F, I and B, and drop them when they are not needed soon.

    At most `gathered` stages are in memory on a rank at a time. The whole order is known, so the stage to drop is
    the one whose next use is farthest away.
    """
    if gathered < 1:
        raise ScheduleError(f"gathered={gathered}: at least one stage must be gathered to compute")
    lists = []
    for actions in schedule.ranks:
        spans = list(_spans(actions, gathered))
        gathers = {span.first: Action(ActionKind.GATHER, span.stage) for span in spans}
        drops = {span.last: Action(ActionKind.DROP, span.stage) for span in spans}
        lowered: list[Action] = []
        for position, action in enumerate(actions):
            around = (gathers.get(position), action, drops.get(position))
            lowered.extend(part for part in around if part is not None)
        lists.append(lowered)
    return schedule.with_ranks(lists)


def _spans(actions: tuple[Action, ...], gathered: int) -> Iterator[_Span]:
    uses = [(position, action.stage) for position, action in enumerate(actions) if action.kind in USES_WEIGHTS]
    present: dict[int, _Span] = {}
    for number, (position, stage) in enumerate(uses):
        if stage in present:
            present[stage] = present[stage]._replace(last=position)
            continue
        if len(present) == gathered:
            later = [other for _, other in uses[number:]]
            farthest = max(present, key=lambda other: later.index(other) if other in later else len(later))
            yield present.pop(farthest)
        present[stage] = _Span(stage, position, position)
    yield from present.values()


def add_reductions(schedule: Schedule) -> Schedule:
    """Add one REDUCE per stage, right after its last W or B, when its gradients are complete."""
    lists = []
    for actions in schedule.ranks:
        last = {
            action.stage: place for place, action in enumerate(actions) if action.kind in (ActionKind.W, ActionKind.B)
        }
        lowered: list[Action] = []
        for place, action in enumerate(actions):
            lowered.append(action)
            if last.get(action.stage) == place:
                lowered.append(Action(ActionKind.REDUCE, action.stage))
        lists.append(lowered)
    return schedule.with_ranks(lists)
