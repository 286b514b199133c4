"""The named schedules: golden text for small ones, bubble and memory as arithmetic for many sizes."""

import re
from fractions import Fraction
from math import ceil

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from retrograde.errors import ScheduleError
from retrograde.pipeline import ActionKind, Costs, Schedule, dry_run, generate, search
from retrograde.pipeline.generators import GENERATORS, interleaved_1f1b, looped_bfs
from retrograde.pipeline.timeline import Timeline
from retrograde.pipeline.vshape import half_block, min_block

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 6, 8) for m in (2 * p - 1, 2 * p, 3 * p + 1)]

GOLDEN = {
    "gpipe": """\
schedule gpipe microbatches=2 placement=0,1
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1F1 1B0 1B1
""",
    "1f1b": """\
schedule 1f1b microbatches=3 placement=0,1
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
""",
    "interleaved-1f1b": """\
schedule interleaved-1f1b microbatches=2 placement=0,1,0,1
rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
""",
    "looped-bfs": """\
schedule looped-bfs microbatches=2 placement=0,1,0,1
rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
""",
    "zb-h1": """\
schedule zb-h1 microbatches=3 placement=0,1
rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
""",
    "zb-h2": """\
schedule zb-h2 microbatches=3 placement=0,1
rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
""",
    "dualpipe-v": """\
schedule dualpipe-v microbatches=4 placement=0,1,1,0
rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
""",
    "zb-v": """\
schedule zb-v microbatches=3 placement=0,1,1,0
rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
""",
}


def microbatches_of(text: str) -> int:
    return Schedule.parse(text).microbatches


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text(name: str) -> None:
    assert str(generate(name, 2, microbatches_of(GOLDEN[name]))) == GOLDEN[name]


def idle(timeline: Timeline) -> float:
    """The bubble in units of one action: (period - work), exact because all times are small integers."""
    return timeline.period - max(timeline.work)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_figures_of_the_linear_schedules(p: int, m: int) -> None:
    figures = {name: dry_run(generate(name, p, m)) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")}
    assert {name: (idle(t), max(t.activations)) for name, t in figures.items()} == {
        "gpipe": (3 * (p - 1), m),
        "1f1b": (3 * (p - 1), min(p, m)),
        "zb-h1": (p - 1, min(p, m)),
        "zb-h2": (0, min(2 * p - 1, m)),
    }
    assert Fraction(figures["1f1b"].bubble).limit_denominator(10_000) == Fraction(p - 1, m)
    assert figures["1f1b"].activations == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_figures_of_the_v_schedules(p: int, m: int) -> None:
    figures = {name: dry_run(generate(name, p, m)) for name in ("zb-v", "v-half", "v-min")}
    # Work on a rank is 6m here (two stages), so 1f1b's bubble would be 6(p-1).
    half = {1: 0, 2: 2}.get(p, 3 * p - (4 if p % 2 else 5))
    assert {name: idle(t) for name, t in figures.items()} == {"zb-v": 0, "v-half": half, "v-min": max(0, 4 * p - 5)}
    # The last rank starts p-1 later than the first: no single step is shorter than that.
    assert figures["zb-v"].makespan == 6 * m + p - 1
    assert max(figures["zb-v"].activations) == min(p, m)
    assert max(figures["v-half"].activations) <= ceil((p + 1) / 2)
    assert max(figures["v-min"].activations) <= ceil((p + 2) / 3)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (1, 2, 3, 4, 5, 6, 8) for m in (2 * p, 2 * p + 1, 3 * p + 1)])
def test_figures_of_dualpipe(p: int, m: int) -> None:
    timeline = dry_run(generate("dualpipe-v", p, m))
    assert idle(timeline) == p - 1  # of work 6m
    assert timeline.makespan == 6 * m + p - 1
    assert max(timeline.activations) == p + 0.5


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 8), (5, 13)])
def test_dualpipe_is_the_one_that_torch_has(p: int, m: int) -> None:
    """But that a forward and a backward which torch would overlap stand one after the other."""
    theirs = object.__new__(ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches = p, m
    rows = [";".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(p)]
    expected = [re.findall(r"\d+[FIWB]\d+", row) for row in rows]
    assert [[str(action) for action in actions] for actions in generate("dualpipe-v", p, m).ranks] == expected


@pytest.mark.parametrize("p", [12, 18])
def test_memory_of_the_v_schedules_is_balanced_and_tends_to_a_half_and_a_third(p: int) -> None:
    assert set(dry_run(generate("zb-v", p, 3 * p)).activations) == {p}
    half, least = (dry_run(generate(name, p, 3 * p)).activations for name in ("v-half", "v-min"))
    assert p / 2 < max(half) <= p / 2 + 1 and min(half) >= p / 2 - 1
    assert p / 3 < max(least) <= p / 3 + 1 and min(least) >= p / 3 - 1


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [2, 3])
def test_figures_of_interleaved(p: int, chunks: int) -> None:
    timeline = dry_run(interleaved_1f1b(p, 4 * p, chunks))
    assert idle(timeline) == 3 * (p - 1)  # of work 3vm: (p-1)/vm
    assert max(timeline.activations) == pytest.approx(p + (p - 1) / chunks)  # a division by 3


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [2, 3])
def test_figures_of_breadth_first(p: int, chunks: int) -> None:
    timeline = dry_run(looped_bfs(p, 4 * p, chunks))
    assert idle(timeline) == 3 * (p - 1)  # of work 3vm: (p-1)/vm
    assert set(timeline.activations) == {4 * p}


@pytest.mark.parametrize("name", GENERATORS)
def test_any_number_of_microbatches_runs_to_its_end(name: str) -> None:
    for p in (1, 2, 3, 5, 6):
        for m in sorted({1, 2, p - 1, p, p + 1, p + 2, 2 * p - 1, 2 * p + 1} - {0}):
            schedule = generate(name, p, m)
            assert dry_run(schedule).ranks == p
            assert schedule.stages == p * GENERATORS[name].chunks
            assert Schedule.parse(str(schedule)) == schedule


def in_order(schedule: Schedule) -> bool:
    """Every kind of action takes the microbatches of a stage in order, so sums over microbatches are torch's."""
    seen: dict[tuple[ActionKind, int], list[int | None]] = {}
    for _, action in schedule.actions():
        parts = (ActionKind.I, ActionKind.W) if action.kind is ActionKind.B else (action.kind,)
        for kind in parts:
            seen.setdefault((kind, action.stage), []).append(action.microbatch)
    return all(order == list(range(schedule.microbatches)) for order in seen.values())


@pytest.mark.parametrize("name", GENERATORS)
def test_microbatches_go_through_a_stage_in_order(name: str) -> None:
    assert all(in_order(generate(name, p, m)) for p, m in ((1, 3), (2, 5), (4, 8), (5, 7)))


@pytest.mark.parametrize("limit", [2.0, 3.0, None])
def test_and_so_they_do_in_what_the_search_finds(limit: float | None) -> None:
    assert in_order(search(4, 8, Costs(1.0, 1.25, 0.75, transfer=0.125), limit, tries=100_000))


def test_unequal_costs_follow_the_formulas_of_the_paper() -> None:
    p, m, f, i, w = 4, 12, 2.0, 3.0, 1.0
    costs = Costs(f, i, w)
    assert idle(dry_run(generate("1f1b", p, m), costs)) == (p - 1) * (f + i + w)
    assert idle(dry_run(generate("zb-h1", p, m), costs)) == (p - 1) * (f + i - w)


def test_weights_come_after_inputs_and_b_stands_for_both() -> None:
    for name in GENERATORS:
        kinds = {action.kind for _, action in generate(name, 3, 6).actions()}
        split = {ActionKind.I, ActionKind.W} if name.startswith(("zb", "v-", "dual")) else set()
        whole = set() if name.startswith(("zb", "v-")) else {ActionKind.B}
        assert kinds == {ActionKind.F} | split | whole


@pytest.mark.parametrize("p", range(1, 30))
def test_the_blocks_never_put_two_actions_in_one_slot(p: int) -> None:
    assert half_block(p).fits(p) and min_block(p).fits(p)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("zb", 2, 2), ("zb-v", 0, 2), ("zb-v", 2, 0)])
def test_bad_arguments_are_named(name: str, ranks: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=r"'zb' is not known; give one of gpipe|(ranks|microbatches)=0 must be"):
        generate(name, ranks, microbatches)
