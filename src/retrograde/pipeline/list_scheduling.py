"""List scheduling: time is simulated, and whenever a rank is free, a dispatch rule picks what it does next.

The rules here leave W for the moments when nothing more urgent can run, and keep the activations under a limit.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrograde.pipeline.schedule import Action, ActionKind, Schedule
from retrograde.pipeline.timeline import Costs, Dependencies

EPSILON = 1e-9  # for rounding in sums of costs: what arrives this much later counts as there


class Progress:
    """What has been done so far, while a schedule is being made."""

    def __init__(self, placement: Sequence[int], microbatches: int, costs: Costs) -> None:
        self.placement = tuple(placement)
        self.microbatches = microbatches
        self.costs = costs
        self.count = {kind: [0] * len(placement) for kind in (ActionKind.F, ActionKind.I, ActionKind.W)}
        self.weights: list[deque[Action]] = [deque() for _ in range(max(placement) + 1)]  # each W whose I is done
        self.kept = [0.0] * (max(placement) + 1)  # activations, of microbatches, on each rank
        self._dependencies = Dependencies(placement, lowered=False)
        self._done: dict[Action, float] = {}

    def next(self, kind: ActionKind, stage: int) -> Action:
        """The action on the next microbatch: microbatches go through a stage in order."""
        return Action(kind, stage, self.count[kind][stage])

    def ready(self, action: Action, now: float) -> bool:
        for need in self._dependencies.needs(action):
            wire = self.costs.transfer if self._dependencies.crosses(need, action) else 0.0
            if need not in self._done or self._done[need] + wire > now + EPSILON:
                return False
        return True

    def do(self, action: Action, now: float) -> float:
        rank = self.placement[action.stage]
        match action.kind:
            case ActionKind.F:
                self.kept[rank] += 1
            case ActionKind.I:
                self.kept[rank] += self.costs.pending - 1
                self.weights[rank].append(Action(ActionKind.W, action.stage, action.microbatch))
            case ActionKind.W:
                self.kept[rank] -= self.costs.pending
                self.weights[rank].remove(action)
        self.count[action.kind][action.stage] += 1
        self._done[action] = now + self.costs.of(action)
        return self._done[action]


DispatchRule = Callable[[Progress, int, float], Action | None]


def make_schedule(name: str, progress: Progress, rule: DispatchRule) -> Schedule | None:
    """Make a schedule by `rule`; None if the rule stops before everything is done."""
    ranks = max(progress.placement) + 1
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks
    moments = [(0.0, rank) for rank in range(ranks)]
    while moments:
        now, rank = heapq.heappop(moments)
        if now < free[rank]:
            continue
        action = rule(progress, rank, now)
        if action is None:
            continue
        lists[rank].append(action)
        free[rank] = progress.do(action, now)
        heapq.heappush(moments, (free[rank], rank))
        for stage in (action.stage - 1, action.stage + 1):
            if 0 <= stage < len(progress.placement) and progress.placement[stage] != rank:
                heapq.heappush(moments, (free[rank] + progress.costs.transfer, progress.placement[stage]))
    if any(
        len(actions) < 3 * progress.microbatches * progress.placement.count(rank) for rank, actions in enumerate(lists)
    ):
        return None
    return Schedule(name, progress.microbatches, progress.placement, tuple(tuple(actions) for actions in lists))


class InOrder:
    """A dispatch rule: F and I in a given order on each rank, and a W whenever the next F or I cannot run."""

    def __init__(self, orders: Sequence[Sequence[Action]], limit: float) -> None:
        self._orders = [deque(order) for order in orders]
        self._limit = limit

    def __call__(self, progress: Progress, rank: int, now: float) -> Action | None:
        order = self._orders[rank]
        fits = progress.kept[rank] + 1 <= self._limit + EPSILON
        if order and (fits or order[0].kind is not ActionKind.F) and progress.ready(order[0], now):
            return order.popleft()
        return progress.weights[rank][0] if progress.weights[rank] else None


@dataclass(frozen=True)
class Greedy:
    """A dispatch rule: the most urgent action that is ready, by `urgency` of kinds, and later stages first for F.

    `caps[stage]` bounds the microbatches of a stage between F and I; `limit` the activations of a rank.
    """

    caps: tuple[int, ...]
    limit: float
    urgency: tuple[ActionKind, ...] = (ActionKind.I, ActionKind.F, ActionKind.W)

    def __call__(self, progress: Progress, rank: int, now: float) -> Action | None:
        stages = [stage for stage, home in enumerate(progress.placement) if home == rank]
        for kind in self.urgency:
            in_order = reversed(stages) if kind is ActionKind.F else stages
            for stage in in_order:
                if self._may(progress, kind, stage, now):
                    return progress.next(kind, stage)
        return None

    def _may(self, progress: Progress, kind: ActionKind, stage: int, now: float) -> bool:
        """Can the next action of this kind and stage run now, within the limits?"""
        forwards = progress.count[ActionKind.F][stage]
        inputs = progress.count[ActionKind.I][stage]
        if kind is ActionKind.W:
            return progress.count[ActionKind.W][stage] < inputs
        if kind is ActionKind.I:
            return inputs < forwards and progress.ready(progress.next(kind, stage), now)
        fits = progress.kept[progress.placement[stage]] + 1 <= self.limit + EPSILON
        open_ = forwards < progress.microbatches and forwards - inputs < self.caps[stage]
        return fits and open_ and progress.ready(progress.next(kind, stage), now)
