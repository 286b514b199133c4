"""Schedules for stages in a V: rank r holds stage r on the way down and stage 2p-1-r on the way up.

[Note: the building block]
Let every action take 1. One microbatch goes through the V in four runs of p hops: F down, F up, I down, I up
(the last stage is on rank 0, so the backward too starts there). If a hop in the runs takes a, b, c, d, then an
activation of rank r lives (p-1-r)(a+d) + (p-1)(b+c) in the first stage and r(b+c) in the second, up to a
constant. With a+d = b+c = s the sum is 2s(p-1) on every rank: memory is balanced. A new microbatch starts every
6 (a rank does two each of F, I and W in that time), so s(p-1)/3 stages' activations are alive, s(p-1)/6 in units
of a rank's share: p for s = 6, half of that for s = 3, a third for s = 2, the least that hops of 1 allow.

The hops and the turns between the runs must be such that no rank has two of its four actions at the same time
modulo 6. The order in time of all F and I is then the order of the schedule; it runs as early as it can, and W
fills the gaps.
"""

from dataclasses import dataclass
from typing import NamedTuple

from retrograde.pipeline.list_scheduling import InOrder, Progress, make_schedule
from retrograde.pipeline.schedule import Action, ActionKind, Schedule
from retrograde.pipeline.timeline import Costs

PERIOD = 6
KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)


def v_placement(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


class StartTimes(NamedTuple):
    """When a rank does its four F and I on the first microbatch."""

    forward_down: int
    forward_up: int
    input_down: int
    input_up: int


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """The times of a hop in each of the four runs, and of the three turns between the runs."""

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def start_times(self, ranks: int) -> list[StartTimes]:
        a, b, c, d = self.hops
        last = ranks - 1
        up = last * a + self.turns[0]
        back = up + last * b + self.turns[1]
        end = back + last * c + self.turns[2]
        return [StartTimes(r * a, up + (last - r) * b, back + r * c, end + (last - r) * d) for r in range(ranks)]

    def fits(self, ranks: int) -> bool:
        return all(len({time % PERIOD for time in times}) == 4 for times in self.start_times(ranks))

    def orders(self, ranks: int, microbatches: int) -> list[list[Action]]:
        """F and I of each rank in the order of the repeated block."""
        orders = []
        for rank, times in enumerate(self.start_times(ranks)):
            down, up = rank, 2 * ranks - 1 - rank
            kinds = ((ActionKind.F, down), (ActionKind.F, up), (ActionKind.I, up), (ActionKind.I, down))
            timed = [
                (time + PERIOD * k, Action(kind, stage, k))
                for k in range(microbatches)
                for time, (kind, stage) in zip(times, kinds, strict=True)
            ]
            orders.append([action for _, action in sorted(timed, key=lambda item: item[0])])
        return orders


def half_block(ranks: int) -> BuildingBlock:
    return BuildingBlock((1, 2, 1, 2), (1, 1, 2) if ranks % 2 else (4, 1, 5))


def min_block(ranks: int) -> BuildingBlock:
    return BuildingBlock((1, 1, 1, 1), (3, 1, 3) if ranks % 3 == 0 else (1, 1, 1))


def v_half(ranks: int, microbatches: int) -> Schedule:
    """s = 3: activations of (p+1)/2 microbatches, rounded up."""
    return _repeat("v-half", half_block(ranks), ranks, microbatches, limit=2 * -(-(ranks + 1) // 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """s = 2: activations of (p+2)/3 microbatches, rounded up."""
    return _repeat("v-min", min_block(ranks), ranks, microbatches, limit=2 * -(-(ranks + 2) // 3))


def _repeat(name: str, block: BuildingBlock, ranks: int, microbatches: int, limit: int) -> Schedule:
    progress = Progress(v_placement(ranks), microbatches, Costs())
    schedule = make_schedule(name, progress, InOrder(block.orders(ranks, microbatches), limit))
    assert schedule is not None, f"{name}: {block} does not run with {limit} activations on {ranks} ranks"
    return schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """s = 6, with the first and last microbatches packed by hand so that not even they leave a gap.

    With every action taking 1, rank r gets its first F at r. Going up, the first microbatch comes by at 2p-1-r:
    until then there is time for 2(p-r)-1 F down. Its I comes at 2p+r: time for r pairs of F up and F down. From
    then on there is one I every 3, first on the way up only (p-r times), then on both ways in turn. At the end I
    goes before W, and the W that are left fill the rest.
    """
    lists = []
    for rank in range(ranks):
        lane = _Lane(microbatches)
        f_down, i_down, w_down = ((kind, rank) for kind in KINDS)
        f_up, i_up, w_up = ((kind, 2 * ranks - 1 - rank) for kind in KINDS)
        lane.repeat(2 * (ranks - rank) - 1, f_down)
        lane.repeat(rank, f_up, f_down)
        lane.repeat(ranks - rank, f_up, i_up, w_up)
        while not lane.finished(*f_up):
            lane.repeat(1, f_down, i_down, w_down, f_up, i_up, w_up)
        lane.repeat(rank, i_down, i_up)
        lane.repeat(ranks - rank, i_down, w_down)
        lane.repeat(microbatches, i_up, i_down)
        lane.repeat(microbatches, w_up)
        lane.repeat(microbatches, w_down)
        lists.append(tuple(lane.actions))
    return Schedule("zb-v", microbatches, v_placement(ranks), tuple(lists))


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """A forward of one microbatch beside the backward of another, in turn: F down, B up, F up, B down.

    The backward is whole but at the two ends: when the first gradients come back, the ranks before wait for I alone,
    and in the second half of the last microbatches W waits until nothing else is left. The list is made for 2p
    microbatches at least; leaving out microbatches of a list that runs cannot make it hang.
    """
    count = max(microbatches, 2 * ranks)
    lists = []
    for rank in range(ranks):
        lane = _Lane(count)
        rest = ranks - 1 - rank
        down, up = rank, 2 * ranks - 1 - rank
        f_down, f_up = (ActionKind.F, down), (ActionKind.F, up)
        b_down, b_up = (ActionKind.B, down), (ActionKind.B, up)
        i_down, i_up = (ActionKind.I, down), (ActionKind.I, up)
        lane.repeat(2 * rest, f_down)
        lane.repeat(rank + 1, f_down, f_up)
        lane.repeat(rest, i_up, (ActionKind.W, up), f_up)
        lane.repeat(count - 2 * ranks + rank + 1, f_down, b_up, f_up, b_down)
        lane.repeat(rest, b_up, f_up, b_down)
        # Of the last 2(r+1) backwards the second half, and all on the way down after them, are I alone.
        last = [step for _ in range(rank + 1) for step in ((b_up, i_up), (b_down, i_down))]
        for number, (whole, inputs) in enumerate(last):
            lane.repeat(1, whole if number <= rank else inputs)
        for _ in range(rest):
            lane.oldest_weights(1)
            lane.repeat(1, i_down)
        lane.oldest_weights(2 * count)
        lists.append(tuple(action for action in lane.actions if action.microbatch in range(microbatches)))
    return Schedule("dualpipe-v", microbatches, v_placement(ranks), tuple(lists))


class _Lane:
    """One rank's list of actions. An action that has no microbatch left, or none ready, is left out. B is I and W."""

    def __init__(self, microbatches: int) -> None:
        self.actions: list[Action] = []
        self._microbatches = microbatches
        self._count: dict[tuple[ActionKind, int], int] = {}
        self._waiting: list[int] = []  # the stages of I whose W is to come, in the order of I

    def repeat(self, times: int, *turn: tuple[ActionKind, int]) -> None:
        for _ in range(times):
            for kind, stage in turn:
                self._add(kind, stage)

    def oldest_weights(self, times: int) -> None:
        for stage in self._waiting[:times]:
            self._add(ActionKind.W, stage)

    def finished(self, kind: ActionKind, stage: int) -> bool:
        return self._done(kind, stage) == self._microbatches

    def _done(self, kind: ActionKind, stage: int) -> int:
        return self._count.get((kind, stage), 0)

    def _add(self, kind: ActionKind, stage: int) -> None:
        counted = ActionKind.I if kind is ActionKind.B else kind
        before = {ActionKind.I: ActionKind.F, ActionKind.W: ActionKind.I}.get(counted)
        available = self._microbatches if before is None else self._done(before, stage)
        number = self._done(counted, stage)
        if number >= available:
            return
        self.actions.append(Action(kind, stage, number))
        self._count[counted, stage] = number + 1
        if kind is ActionKind.B:
            self._count[ActionKind.W, stage] = self._done(ActionKind.W, stage) + 1
        elif kind is ActionKind.I:
            self._waiting.append(stage)
        elif kind is ActionKind.W:
            self._waiting.remove(stage)
