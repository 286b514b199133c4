"""Making a schedule by playing it: whenever a rank is free, a rule picks what it does next.

The rules here leave W for the moments when nothing more urgent can run, and keep the activations under a limit.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrograde.pipeline.schedule import Action, Kind, Schedule
from retrograde.pipeline.timeline import Costs, Wiring

EPSILON = 1e-9  # sums of measured costs: what arrives this much later is there


class Floor:
    """What has been done so far, while a schedule is being made."""

    def __init__(self, placement: Sequence[int], microbatches: int, costs: Costs) -> None:
        self.placement = tuple(placement)
        self.microbatches = microbatches
        self.costs = costs
        self.count = {kind: [0] * len(placement) for kind in (Kind.F, Kind.I, Kind.W)}
        self.weights: list[deque[Action]] = [deque() for _ in range(max(placement) + 1)]  # I done, W not yet
        self.held = [0.0] * (max(placement) + 1)
        self._wiring = Wiring(placement, lowered=False)
        self._done: dict[Action, float] = {}

    def next(self, kind: Kind, stage: int) -> Action:
        """Microbatches go through a stage in order."""
        return Action(kind, stage, self.count[kind][stage])

    def ready(self, action: Action, now: float) -> bool:
        for need in self._wiring.needs(action):
            wire = self.costs.transfer if self._wiring.crosses(need, action) else 0.0
            if need not in self._done or self._done[need] + wire > now + EPSILON:
                return False
        return True

    def do(self, action: Action, now: float) -> float:
        rank = self.placement[action.stage]
        match action.kind:
            case Kind.F:
                self.held[rank] += 1
            case Kind.I:
                self.held[rank] += self.costs.pending - 1
                self.weights[rank].append(Action(Kind.W, action.stage, action.microbatch))
            case Kind.W:
                self.held[rank] -= self.costs.pending
                self.weights[rank].remove(action)
        self.count[action.kind][action.stage] += 1
        self._done[action] = now + self.costs.of(action)
        return self._done[action]


Rule = Callable[[Floor, int, float], Action | None]


def play(name: str, floor: Floor, rule: Rule) -> Schedule | None:
    """The schedule that `rule` makes; None if it stops before everything is done."""
    ranks = max(floor.placement) + 1
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks
    moments = [(0.0, rank) for rank in range(ranks)]
    while moments:
        now, rank = heapq.heappop(moments)
        if now < free[rank] or (action := rule(floor, rank, now)) is None:
            continue
        lists[rank].append(action)
        free[rank] = floor.do(action, now)
        heapq.heappush(moments, (free[rank], rank))
        for stage in (action.stage - 1, action.stage + 1):
            if 0 <= stage < len(floor.placement) and floor.placement[stage] != rank:
                heapq.heappush(moments, (free[rank] + floor.costs.transfer, floor.placement[stage]))
    if any(len(actions) < 3 * floor.microbatches * floor.placement.count(rank) for rank, actions in enumerate(lists)):
        return None
    return Schedule(name, floor.microbatches, floor.placement, tuple(tuple(actions) for actions in lists))


class InOrder:
    """F and I in a given order on each rank; a W whenever the next of them cannot run."""

    def __init__(self, orders: Sequence[Sequence[Action]], limit: float) -> None:
        self._orders = [deque(order) for order in orders]
        self._limit = limit

    def __call__(self, floor: Floor, rank: int, now: float) -> Action | None:
        order = self._orders[rank]
        room = floor.held[rank] + 1 <= self._limit + EPSILON
        if order and (room or order[0].kind is not Kind.F) and floor.ready(order[0], now):
            return order.popleft()
        return floor.weights[rank][0] if floor.weights[rank] else None


@dataclass(frozen=True)
class Greedy:
    """The most urgent of what is ready: by `urgency` of kinds, later stages first for F.

    `caps[stage]` bounds the microbatches of a stage between F and I; `limit` the activations of a rank.
    """

    caps: tuple[int, ...]
    limit: float
    urgency: tuple[Kind, ...] = (Kind.I, Kind.F, Kind.W)

    def __call__(self, floor: Floor, rank: int, now: float) -> Action | None:
        for kind in self.urgency:
            for stage in range(len(self.caps) - 1, -1, -1) if kind is Kind.F else range(len(self.caps)):
                if floor.placement[stage] == rank and self._may(floor, kind, stage, now):
                    return floor.next(kind, stage)
        return None

    def _may(self, floor: Floor, kind: Kind, stage: int, now: float) -> bool:
        forwards, inputs = floor.count[Kind.F][stage], floor.count[Kind.I][stage]
        if kind is Kind.W:
            return floor.count[Kind.W][stage] < inputs
        if kind is Kind.I:
            return inputs < forwards and floor.ready(floor.next(kind, stage), now)
        room = floor.held[floor.placement[stage]] + 1 <= self.limit + EPSILON
        open_ = forwards < floor.microbatches and forwards - inputs < self.caps[stage]
        return room and open_ and floor.ready(floor.next(kind, stage), now)
