"""`auto`: the schedule with the least bubble for given costs and a limit on activations.

The search first makes a portfolio: the named schedules; their orders of F and I with W placed anew for these costs; and
lists made greedily with different numbers of microbatches in flight. Then it improves the best few by moving single
actions.
Nothing depends on time or chance (the generator of moves is seeded), so every rank finds the same schedule.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from retrograde.errors import ScheduleError
from retrograde.pipeline.dryrun import check
from retrograde.pipeline.generators import GENERATORS, check_size, generate
from retrograde.pipeline.list_scheduling import Greedy, InOrder, Progress, make_schedule
from retrograde.pipeline.schedule import Action, ActionKind, Schedule
from retrograde.pipeline.timeline import Costs, Timeline, try_simulate
from retrograde.pipeline.vshape import v_placement

ACTIONS_TRIED = 600_000  # simulated actions while schedules are improved: a few seconds
MOVES = 2_000  # the most moves from one start; small cases are settled long before
STARTS = 3  # how many schedules of the portfolio are improved
REACH = 6  # how far a move carries an action
KEEPS = {  # the kinds of another microbatch that an action must not pass, since B is I and W
    ActionKind.F: (ActionKind.F,),
    ActionKind.I: (ActionKind.I, ActionKind.B),
    ActionKind.W: (ActionKind.W, ActionKind.B),
    ActionKind.B: (ActionKind.I, ActionKind.W, ActionKind.B),
}
SLOPES = (0, 1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1, 4 / 3, 3 / 2, 2, 4)
URGENCIES = (
    (ActionKind.I, ActionKind.F, ActionKind.W),
    (ActionKind.F, ActionKind.I, ActionKind.W),
    (ActionKind.I, ActionKind.W, ActionKind.F),
)


@dataclass(frozen=True)
class Problem:
    """What to search for. `costs`: of a rank's whole share or of each stage; `limit`: in microbatches of the share."""

    ranks: int
    microbatches: int
    costs: Costs
    limit: float

    def allows(self, chunks: int) -> bool:
        stages = self.costs.stages
        return stages is None or stages == chunks * self.ranks

    def costs_for(self, chunks: int) -> Costs:
        return self.costs.per_chunk(chunks) if self.costs.stages is None else self.costs


@dataclass(frozen=True)
class Candidate:
    """A schedule that the search has found, and what it costs."""

    schedule: Schedule
    timeline: Timeline

    @property
    def merit(self) -> tuple[float, float, float, float]:
        """Smaller is better. It is rounded, so that the order in which floats are added does not decide."""
        timeline = self.timeline
        ends = sum(row[-1].end for row in timeline.by_rank)  # moves that help one rank only still lead somewhere
        return round(timeline.bubble, 9), round(timeline.step_bubble, 9), round(ends, 9), max(timeline.activations)


def search(
    ranks: int, microbatches: int, costs: Costs | None = None, limit: float | None = None, tries: int = ACTIONS_TRIED
) -> Schedule:
    """The best schedule found, named "auto".

    `costs` are those of one microbatch through a rank's whole share of the model, and schedules with two stages per
    rank have half of it in each; or costs for each stage, which also say how many stages there are.
    `limit`: activations per rank, in microbatches of that share (1f1b needs `ranks`).
    """
    check_size("auto", ranks, microbatches)
    problem = Problem(ranks, microbatches, costs or Costs(), math.inf if limit is None else limit)
    if not (problem.allows(1) or problem.allows(2)):
        raise ScheduleError(
            f"schedule 'auto': costs are given for {problem.costs.stages} stages; "
            f"{ranks} ranks have {ranks} or {2 * ranks}"
        )
    found = [candidate for candidate in (_judge(problem, made) for made in _portfolio(problem)) if candidate]
    fitting = [c for c in found if max(c.timeline.activations) <= problem.limit + 1e-9]
    if not fitting:
        least = min(found, key=lambda c: max(c.timeline.activations))
        raise ScheduleError(
            f"schedule 'auto': no schedule for {ranks} ranks and {microbatches} microbatches was found that holds at "
            f"most limit={limit} activations; a limit of {max(least.timeline.activations):g} works "
            f"({least.schedule.name}), or smaller microbatches"
        )
    fitting.sort(key=lambda candidate: candidate.merit)
    improved = [_improve(problem, candidate, tries // STARTS) for candidate in fitting[:STARTS]]
    return replace(min(improved, key=lambda candidate: candidate.merit).schedule, name="auto")


def schedule_for(
    schedule: str | Schedule, ranks: int, microbatches: int, costs: Costs | None = None, limit: float | None = None
) -> Schedule:
    """What a user means by `schedule`: a name, "auto", or a schedule of their own, which is checked."""
    if isinstance(schedule, str):
        if schedule == "auto":
            return search(ranks, microbatches, costs, limit)
        if schedule not in GENERATORS:
            names = ", ".join(GENERATORS)
            raise ScheduleError(f"schedule={schedule!r} is not known; give one of {names}, 'auto' or a Schedule")
        return generate(schedule, ranks, microbatches)
    for what, has, wanted in (
        ("ranks", len(schedule.ranks), ranks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if has != wanted:
            raise ScheduleError(f"schedule '{schedule.name}' is for {has} {what}, but {wanted} are used")
    check(schedule)
    return schedule


def _judge(problem: Problem, schedule: Schedule) -> Candidate | None:
    timeline = try_simulate(schedule, problem.costs_for(schedule.stages // problem.ranks))
    return None if timeline is None else Candidate(schedule, timeline)


def _portfolio(problem: Problem) -> Iterator[Schedule]:
    for generator in GENERATORS.values():
        if problem.allows(generator.chunks):
            schedule = generator.make(problem.ranks, problem.microbatches)
            yield schedule
            yield from _refilled(problem, schedule)
    for placement in (tuple(range(problem.ranks)), v_placement(problem.ranks)):
        if problem.allows(len(placement) // problem.ranks):
            yield from _greedy(problem, placement)


def _refilled(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    """The schedule's order of F and I, with each B as an I, and W placed in the gaps that these costs leave."""
    orders = [
        [_without_weights(action) for action in actions if action.kind is not ActionKind.W]
        for actions in schedule.ranks
    ]
    chunks = schedule.stages // problem.ranks
    progress = Progress(schedule.placement, problem.microbatches, problem.costs_for(chunks))
    made = make_schedule(schedule.name, progress, InOrder(orders, problem.limit * chunks))
    if made is not None:
        yield made


def _without_weights(action: Action) -> Action:
    return replace(action, kind=ActionKind.I) if action.kind is ActionKind.B else action


def _greedy(problem: Problem, placement: tuple[int, ...]) -> Iterator[Schedule]:
    """Make lists greedily. A stage k hops before the end may have `first` + k*slope microbatches in flight."""
    chunks = len(placement) // problem.ranks
    most = problem.microbatches * chunks
    for urgency in URGENCIES:
        for first, slope in itertools.product((1, 2), SLOPES):
            caps = tuple(min(most, first + math.ceil(slope * hops)) for hops in reversed(range(len(placement))))
            progress = Progress(placement, problem.microbatches, problem.costs_for(chunks))
            made = make_schedule("greedy", progress, Greedy(caps, min(problem.limit * chunks, most), urgency))
            if made is not None:
                yield made


def _improve(problem: Problem, best: Candidate, tries: int) -> Candidate:
    """Move one action at a time, and keep each move that makes the schedule no worse."""
    moves = random.Random(0)
    for _ in range(min(MOVES, tries // sum(map(len, best.schedule.ranks)))):
        if best.timeline.bubble == 0 and best.timeline.step_bubble == 0:
            break
        moved = _moved(best.schedule, moves)
        candidate = None if moved is None else _judge(problem, moved)
        if (
            candidate is not None
            and max(candidate.timeline.activations) <= problem.limit + 1e-9
            and candidate.merit[:2] <= best.merit[:2]
        ):
            best = candidate
    return best


def _moved(schedule: Schedule, moves: random.Random) -> Schedule | None:
    """Move one action; None if microbatches would no longer go through its stage in order."""
    ranks: list[list[Action]] = [list(actions) for actions in schedule.ranks]
    actions = ranks[moves.randrange(len(ranks))]
    source = moves.randrange(len(actions))
    target = max(0, min(len(actions) - 1, source + moves.choice((-1, 1)) * moves.randint(1, REACH)))
    action = actions.pop(source)
    overtaken = actions[min(source, target) : max(source, target)]
    if any(other.kind in KEEPS[action.kind] and other.stage == action.stage for other in overtaken):
        return None
    actions.insert(target, action)
    return schedule.with_ranks(ranks)
