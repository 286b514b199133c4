"""`auto`: never worse than a named schedule, never over the limit, the true optimum where it can be enumerated."""

import importlib
import itertools

import pytest

from retrograde.errors import ScheduleError
from retrograde.pipeline import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    Timeline,
    check,
    generate,
    schedule_for,
    search,
    simulate,
)
from retrograde.pipeline.generators import GENERATORS
from retrograde.pipeline.list_scheduling import InOrder, Progress, make_schedule
from retrograde.pipeline.timeline import try_simulate

FEW = 10_000  # simulated actions: enough to improve small cases


def timeline_of(schedule: Schedule, costs: Costs) -> Timeline:
    return simulate(schedule, costs.per_chunk(schedule.stages // len(schedule.ranks)))


@pytest.mark.parametrize("limit", [2.0, 4.0, None])
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.25, 0.75, transfer=0.125), Costs(1.0, 2.0, 0.5, 0.25, 0.5)])
def test_no_named_schedule_within_the_limit_is_better(costs: Costs, limit: float | None) -> None:
    found = search(4, 8, costs, limit, tries=FEW)
    check(found)
    timeline = timeline_of(found, costs)
    assert found.name == "auto"
    assert limit is None or max(timeline.activations) <= limit
    for name in GENERATORS:
        named = timeline_of(generate(name, 4, 8), costs)
        if limit is None or max(named.activations) <= limit:
            assert timeline.bubble <= named.bubble + 1e-9  # merits are rounded there


def test_it_beats_every_named_schedule_where_none_was_made_for_the_case() -> None:
    costs, limit = Costs(transfer=0.25), 2.5
    named = [timeline_of(generate(name, 3, 7), costs) for name in GENERATORS]
    least = min(timeline.bubble for timeline in named if max(timeline.activations) <= limit)
    assert timeline_of(search(3, 7, costs, limit, tries=FEW), costs).bubble < 0.75 * least


def test_moves_improve_what_the_portfolio_has() -> None:
    costs = Costs(1.0, 1.25, 0.75, transfer=0.125)
    first, second = (timeline_of(search(4, 8, costs, 3.0, tries), costs).bubble for tries in (0, 20 * FEW))
    assert second < first


def test_weight_gradients_are_placed_anew_for_the_costs() -> None:
    costs, limit = Costs(1.0, 1.0, 0.25, transfer=0.125), 2.5
    order = [
        [action for action in actions if action.kind is not ActionKind.W] for actions in generate("v-half", 3, 8).ranks
    ]
    progress = Progress(generate("v-half", 3, 8).placement, 8, costs.per_chunk(2))
    filled = make_schedule("filled", progress, InOrder(order, 2 * limit))
    assert filled is not None
    check(filled)
    bubble = timeline_of(filled, costs).bubble
    assert bubble < timeline_of(generate("v-half", 3, 8), costs).bubble
    assert timeline_of(search(3, 8, costs, limit, tries=0), costs).bubble <= bubble


def test_zero_bubble_is_found_at_the_memory_of_1f1b() -> None:
    assert timeline_of(search(4, 8, limit=4.0, tries=FEW), Costs()).bubble == 0


def all_lists(rank: int) -> list[tuple[Action, ...]]:
    """Every order of F, I, W of two microbatches on one stage."""
    found = []
    for first in itertools.combinations(range(6), 3):
        chains = [iter([Action(kind, rank, k) for kind in (ActionKind.F, ActionKind.I, ActionKind.W)]) for k in (0, 1)]
        found.append(tuple(next(chains[0] if position in first else chains[1]) for position in range(6)))
    return found


@pytest.mark.parametrize("limit", [1.0, 2.0])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.0, 3.0), (3.0, 1.0, 2.0)])
def test_it_is_the_optimum_of_all_schedules_of_two_ranks(times: tuple[float, float, float], limit: float) -> None:
    forward, input_, weight = times
    costs = Costs((forward,) * 2, (input_,) * 2, (weight,) * 2, transfer=0.5)  # for each stage: one stage per rank
    bubbles = []
    for lists in itertools.product(all_lists(0), all_lists(1)):
        timeline = try_simulate(Schedule("any", 2, (0, 1), lists), costs)
        if timeline is not None and max(timeline.activations) <= limit:
            bubbles.append(timeline.bubble)
    assert len(bubbles) > 1
    assert simulate(search(2, 2, costs, limit, tries=FEW), costs).bubble == pytest.approx(min(bubbles), abs=1e-9)


def test_costs_for_each_stage_fix_the_number_of_stages() -> None:
    costs = Costs((1.0, 1.0, 1.0, 3.0), (1.0,) * 4, (1.0,) * 4)
    assert search(4, 8, costs, tries=0).stages == 4
    assert search(2, 8, costs, tries=0).stages == 4
    with pytest.raises(ScheduleError, match="costs are given for 4 stages; 3 ranks have 3 or 6"):
        search(3, 8, costs)


def test_moves_keep_microbatches_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some backwards of a stage are whole and others are not, as in dualpipe-v."""
    start = generate("dualpipe-v", 4, 8)
    module = importlib.import_module("retrograde.pipeline.search")  # the package has a function of this name
    monkeypatch.setattr(module, "_portfolio", lambda problem: [start])
    found = search(4, 8, Costs(1.0, 2.0, 0.25, transfer=0.25), tries=20 * FEW)
    assert found.ranks != start.ranks
    for kinds in ((ActionKind.F,), (ActionKind.I, ActionKind.B), (ActionKind.W, ActionKind.B)):
        for stage, home in enumerate(found.placement):
            order = [a.microbatch for a in found.ranks[home] if a.stage == stage and a.kind in kinds]
            assert order == list(range(8))


def test_every_rank_finds_the_same() -> None:
    costs = Costs(1.0, 1.25, 0.75, transfer=0.125)
    assert search(3, 6, costs, 2.5, tries=FEW) == search(3, 6, costs, 2.5, tries=FEW)


def test_a_limit_nothing_fits_is_refused_with_one_that_works() -> None:
    with pytest.raises(ScheduleError, match=r"at most limit=0.5 activations; a limit of 2 works \(v-min\)"):
        search(4, 8, limit=0.5)


def test_the_least_possible_limit_works() -> None:
    assert max(timeline_of(search(4, 6, limit=1.0, tries=0), Costs()).activations) == 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 2), (2, 0), (2, -1)])
def test_nothing_to_schedule_is_refused(ranks: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=r"^schedule 'auto': (ranks=0|microbatches=(0|-1)) must be at least 1$"):
        search(ranks, microbatches)


@pytest.mark.parametrize(
    "bad",
    [
        {"forward": -1.0},
        {"transfer": -0.1},
        {"forward": (1.0,), "input": (1.0, 2.0)},
        {"weight": float("nan")},
        {"input": (1.0, float("inf"))},
    ],
)
def test_bad_costs_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ScheduleError, match=r"^Costs: "):
        Costs(**bad)


def test_what_a_user_may_give_as_schedule() -> None:
    assert schedule_for("zb-v", 2, 4) == generate("zb-v", 2, 4)
    assert schedule_for("auto", 1, 2).name == "auto"
    mine = Schedule("mine", 4, (0, 1), generate("1f1b", 2, 4).ranks)
    assert schedule_for(mine, 2, 4) is mine
    for wrong, ranks, microbatches, message in (
        ("zbv", 2, 4, r"schedule='zbv' is not known; give one of gpipe, .*'auto' or a Schedule"),
        (mine, 4, 4, "schedule 'mine' is for 2 ranks, but 4 are used"),
        (mine, 2, 8, "schedule 'mine' is for 4 microbatches, but 8 are used"),
        (mine.with_ranks(reversed(mine.ranks)), 2, 4, "1F0 is on rank 0, but stage 1 is on rank 1"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedule_for(wrong, ranks, microbatches)
