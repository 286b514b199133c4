"""Simulates when each action of a schedule runs, by its costs; bubble and activations follow from that.

[Note: bubble and makespan]
A rank's *span* is the time from its first action to its last; the *period* is the longest span. Steps can
follow each other at that distance if no rank waits for all others in between, so the bubble of the literature
is (period - work) / work, with the work of the busiest rank: (p-1)/m for 1F1B. The *makespan*, from the first
action of all to the last, is what a single step takes; ranks that start late add to it.

[Note: activations]
One activation is what a forward of one stage keeps for one microbatch. It counts from the start of F to the
end of W; between I and W it counts `Costs.pending`. Divided by the stages per rank this is in units of one
microbatch through a rank's whole share of the model, in which 1F1B needs p on rank 0.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from retrograde.errors import ScheduleError
from retrograde.pipeline.schedule import BACKWARD, Action, ActionKind, Place, Schedule

Cost = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one stage's F, I and W on one microbatch (a number, or one for each stage) and of one transfer."""

    forward: Cost = 1.0
    input: Cost = 1.0
    weight: Cost = 1.0
    transfer: float = 0.0
    pending: float = 1.0  # the share of an activation that lives between I and W

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "transfer", "pending"):
            value = getattr(self, name)
            costs = value if isinstance(value, tuple) else (value,)
            if any(cost < 0 for cost in costs):
                raise ScheduleError(f"Costs: {name}={value!r} is negative")
            if not all(map(math.isfinite, costs)):
                raise ScheduleError(f"Costs: {name}={value!r} is not finite")
        counts = self._counts()
        if len(counts) > 1:
            raise ScheduleError(f"Costs: they are given for {sorted(counts)} stages; give as many for F, I and W")

    def of(self, action: Action) -> float:
        match action.kind:
            case ActionKind.F:
                return _at(self.forward, action.stage)
            case ActionKind.I:
                return _at(self.input, action.stage)
            case ActionKind.W:
                return _at(self.weight, action.stage)
            case ActionKind.B:
                return _at(self.input, action.stage) + _at(self.weight, action.stage)
        return 0.0

    @property
    def stages(self) -> int | None:
        """How many stages the costs are for; None if they are the same for all."""
        return max(self._counts(), default=None)

    def _counts(self) -> set[int]:
        return {len(cost) for cost in (self.forward, self.input, self.weight) if isinstance(cost, tuple)}

    def per_chunk(self, chunks: int) -> "Costs":
        """Divide the costs of a rank's whole share into those of `chunks` equal stages."""
        if isinstance(self.forward, tuple) or isinstance(self.input, tuple) or isinstance(self.weight, tuple):
            raise ScheduleError("Costs: costs for each stage are already per chunk")
        return replace(self, forward=self.forward / chunks, input=self.input / chunks, weight=self.weight / chunks)


def _at(cost: Cost, stage: int) -> float:
    if not isinstance(cost, tuple):
        return cost
    if stage >= len(cost):
        raise ScheduleError(f"Costs: {len(cost)} costs are given, but the schedule has a stage {stage}")
    return cost[stage]


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its place in time, planned or measured."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When all actions run: `timed` is in order of time on each rank. There are `chunks` stages per rank."""

    timed: tuple[Timed, ...]
    ranks: int
    chunks: float = 1.0
    pending: float = 1.0

    @cached_property
    def by_rank(self) -> tuple[tuple[Timed, ...], ...]:
        rows: list[list[Timed]] = [[] for _ in range(self.ranks)]
        for item in self.timed:
            if item.action.kind.is_compute:
                rows[item.rank].append(item)
        return tuple(tuple(row) for row in rows)

    @cached_property
    def start(self) -> float:
        return min((row[0].start for row in self.by_rank if row), default=0.0)

    @cached_property
    def makespan(self) -> float:
        return max((row[-1].end for row in self.by_rank if row), default=0.0) - self.start

    @cached_property
    def work(self) -> tuple[float, ...]:
        return tuple(sum(item.end - item.start for item in row) for row in self.by_rank)

    @cached_property
    def period(self) -> float:
        return max((row[-1].end - row[0].start for row in self.by_rank if row), default=0.0)

    @property
    def bubble(self) -> float:
        """See [Note: bubble and makespan]; 0 is perfect."""
        return _ratio(self.period, max(self.work))

    @property
    def step_bubble(self) -> float:
        """The bubble of a single step, in which every rank waits for the last one."""
        return _ratio(self.makespan, max(self.work))

    def rank_bubble(self, rank: int) -> float:
        """The part of the makespan in which `rank` is idle."""
        return 1 - self.work[rank] / self.makespan if self.makespan else 0.0

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """The peak on each rank; see [Note: activations]."""
        return tuple(_peak((i.action for i in row), self.pending) / self.chunks for row in self.by_rank)


def _ratio(time: float, work: float) -> float:
    # Sums of floats in another order: a difference below any real bubble is none.
    return 0.0 if not work or abs(time - work) < 1e-9 * work else (time - work) / work


def _peak(actions: Iterable[Action], pending: float) -> float:
    alive = 0.0
    peak = 0.0
    for action in actions:
        match action.kind:
            case ActionKind.F:
                alive += 1
            case ActionKind.I:
                alive += pending - 1
            case ActionKind.W:
                alive -= pending
            case ActionKind.B:
                alive -= 1
        peak = max(peak, alive)
    return peak


class Dependencies:
    """The dependencies between the actions of any schedule with this placement."""

    def __init__(self, placement: Sequence[int], lowered: bool) -> None:
        self._placement = placement
        self._lowered = lowered
        self._known: dict[Action, list[Action]] = {}

    @staticmethod
    def of(schedule: Schedule) -> "Dependencies":
        return _dependencies(schedule.placement, any(action.kind.is_transfer for _, action in schedule.actions()))

    def needs(self, action: Action) -> list[Action]:
        """The actions that must be done before `action` starts. An I among them may be part of a B."""
        if action not in self._known:
            self._known[action] = self._find(action)
        return self._known[action]

    def _find(self, action: Action) -> list[Action]:
        kind, stage, micro = action.kind, action.stage, action.microbatch
        match kind:
            case ActionKind.F:
                return [] if stage == 0 else self._from(ActionKind.F, stage - 1, stage, micro)
            case ActionKind.I | ActionKind.B:
                own = [Action(ActionKind.F, stage, micro)]
                last = stage == len(self._placement) - 1
                return own if last else [*own, *self._from(ActionKind.I, stage + 1, stage, micro)]
            case ActionKind.W | ActionKind.SEND_B:
                return [Action(ActionKind.I, stage, micro)]
            case ActionKind.SEND_F:
                return [Action(ActionKind.F, stage, micro)]
        return []

    def crosses(self, need: Action, action: Action) -> bool:
        """Whether what `action` needs comes from another rank."""
        return self._placement[need.stage] != self._placement[action.stage]

    def _from(self, kind: ActionKind, source: int, stage: int, micro: int | None) -> list[Action]:
        if not self._lowered or self._placement[source] == self._placement[stage]:
            return [Action(kind, source, micro)]
        forward = kind is ActionKind.F
        return [
            Action(ActionKind.SEND_F if forward else ActionKind.SEND_B, source, micro),
            Action(ActionKind.RECV_F if forward else ActionKind.RECV_B, stage, micro),
        ]


@lru_cache(maxsize=8)  # a search simulates thousands of schedules with one placement
def _dependencies(placement: tuple[int, ...], lowered: bool) -> Dependencies:
    return Dependencies(placement, lowered)


@dataclass(frozen=True)
class StuckRank:
    """A rank that would wait for ever: at which action, and for which other."""

    place: Place
    action: Action
    need: Action


class _Run:
    """A simulation: each rank goes through its list until it needs an action that is not done yet."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.dependencies = Dependencies.of(schedule)
        self.done: dict[Action, float] = {}
        self.timed: list[Timed] = []
        self.clock = [0.0] * len(schedule.ranks)
        self.position = [0] * len(schedule.ranks)
        self.waiting: dict[Action, set[int]] = {}

    def run(self) -> None:
        awake = list(range(len(self.schedule.ranks)))
        while awake:
            awake.extend(self._advance(awake.pop()))

    def _advance(self, rank: int) -> list[int]:
        woken: list[int] = []
        actions = self.schedule.ranks[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            needs = self.dependencies.needs(action)
            missing = next((need for need in needs if need not in self.done), None)
            if missing is not None:
                self.waiting.setdefault(missing, set()).add(rank)
                break
            start = max([self.clock[rank], *(self._arrival(need, action) for need in needs)])
            end = start + self.costs.of(action)
            self.clock[rank] = end
            self.timed.append(Timed(rank, action, start, end))
            self.position[rank] += 1
            for made in _made(action):
                self.done[made] = end
                woken.extend(self.waiting.pop(made, ()))
        return woken

    def _arrival(self, need: Action, action: Action) -> float:
        return self.done[need] + (self.costs.transfer if self.dependencies.crosses(need, action) else 0.0)

    def stuck(self) -> list[StuckRank]:
        found = []
        for need, ranks in self.waiting.items():
            for rank in ranks:
                place = Place(rank, self.position[rank])
                found.append(StuckRank(place, self.schedule.ranks[rank][place.position], need))
        return sorted(found, key=lambda item: item.place)


def _made(action: Action) -> list[Action]:
    if action.kind is ActionKind.B:
        return [action, Action(ActionKind.I, action.stage, action.microbatch)]
    return [action]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Start and end of every action. The schedule must be able to run: `check` it first."""
    timeline = try_simulate(schedule, costs or Costs())
    if timeline is None:
        stuck = find_stuck(schedule)[0]
        raise ScheduleError(
            f"schedule '{schedule.name}' does not run to its end: rank {stuck.place.rank} waits at "
            f"{stuck.action} for {stuck.need}; check() says more"
        )
    return timeline


def try_simulate(schedule: Schedule, costs: Costs) -> Timeline | None:
    """As `simulate`; None for a schedule that does not run to its end."""
    run = _Run(schedule, costs)
    run.run()
    if run.waiting:
        return None
    order = sorted(range(len(run.timed)), key=lambda i: (run.timed[i].start, i))
    chunks = schedule.stages / len(schedule.ranks)
    return Timeline(tuple(run.timed[i] for i in order), len(schedule.ranks), chunks, costs.pending)


def find_stuck(schedule: Schedule) -> list[StuckRank]:
    """The ranks that would wait for ever, in rank order; empty if the schedule runs to its end."""
    run = _Run(schedule, Costs())
    run.run()
    return run.stuck()


def has_backward(schedule: Schedule) -> bool:
    return any(action.kind in BACKWARD or action.kind is ActionKind.W for _, action in schedule.actions())
