"""What is wrong with a schedule is found before it starts, and the message shows the place."""

import pytest

from retrograde.errors import ScheduleError
from retrograde.pipeline import Action, Costs, Schedule, check, dry_run, generate, lower, simulate
from retrograde.pipeline.generators import GENERATORS

GOOD = """\
schedule mine microbatches=2 placement=0,1
rank 0: 0F0 0F1 0I0 0W0 0B1
rank 1: 1F0 1B0 1F1 1I1 1W1
"""
LOWERED = """\
schedule mine microbatches=1 placement=0,1
rank 0: 0GATHER 0F0 0SEND_F0 0RECV_B0 0I0 0DROP 0W0 0REDUCE
rank 1: 1GATHER 1RECV_F0 1F0 1B0 1DROP 1SEND_B0 1REDUCE
"""


def refuse(text: str) -> str:
    with pytest.raises(ScheduleError) as error:
        check(Schedule.parse(text))
    return str(error.value)


@pytest.mark.parametrize("text", [GOOD, LOWERED])
def test_what_is_right_passes(text: str) -> None:
    check(Schedule.parse(text))


@pytest.mark.parametrize(
    ("old", "new", "message", "mark"),
    [
        ("0F1", "0F2", "0F2 on rank 0: there are microbatches 0 to 1", ">0F2<"),
        ("0F1", "2F1", "2F1 on rank 0: there are stages 0 to 1", ">2F1<"),
        ("1F1", "0F1", "0F1 is on rank 1, but stage 0 is on rank 0", ">0F1<"),
        ("0W0", "0B0", "0I0 is done twice on rank 0", ">0I0< >0B0<"),
        ("0F1", "0F0", "0F0 is done twice on rank 0", ">0F0< >0F0<"),
        (" 1W1", "", "1W1 is missing on rank 1", ">1I1<"),
        (" 0I0 0W0 0B1", " 0B1", "0I0 is missing on rank 0 and 1 more actions", ">0B1<"),
        ("0I0 0W0", "0W0 0I0", "rank 0 waits at 0W0 for 0I0, which stands later on the same rank", ">0W0<"),
        ("1F0 1B0", "1B0 1F0", "rank 1 waits at 1B0 for 1F0, which stands later on the same rank", ">1B0<"),
        ("microbatches=2", "microbatches=0", "it has 0 microbatches", ""),
        ("placement=0,1", "placement=1,1", "does not give each of 2 ranks a stage", ""),
    ],
)
def test_faults_are_named_and_marked(old: str, new: str, message: str, mark: str) -> None:
    said = refuse(GOOD.replace(old, new, 1))
    assert said.startswith("schedule 'mine' is not valid: ")
    assert message in said and mark in said
    assert "\nrank 0 | " in said and "\nrank 1 | " in said


def test_a_deadlock_across_ranks_names_both_ends() -> None:
    said = refuse(GOOD.replace("0F0 0F1 0I0 0W0 0B1", "0F0 0I0 0F1 0W0 0B1").replace("1B0 1F1 1I1", "1F1 1B0 1I1"))
    assert "it would hang" in said
    assert "rank 0 waits at 0I0 for 1I0, which rank 1 does later than 1F1" in said
    assert "rank 1 waits at 1F1 for 0F1, which rank 0 does later than 0I0" in said
    assert "rank 0 | 0F0   >0I0< 0F1   0W0   0B1\nrank 1 | 1F0   >1F1< 1B0   1I1   1W1" in said


def test_only_the_neighbourhood_of_the_fault_is_shown() -> None:
    schedule = generate("1f1b", 4, 64)
    ranks = [list(actions) for actions in schedule.ranks]
    ranks[2][40], ranks[2][41] = ranks[2][41], ranks[2][41]
    with pytest.raises(ScheduleError) as error:
        check(schedule.with_ranks(ranks))
    assert max(map(len, str(error.value).splitlines())) < 120
    assert str(error.value).count(">") == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0SEND_F0 0RECV_B0", "0RECV_B0 0SEND_F0", "ranks 0 and 1 exchange in another order: message 0 is 1SEND_B0"),
        (" 1RECV_F0", "", "ranks 0 and 1 exchange in another order: message 0 is 0SEND_F0 for rank 0 and 1SEND_B0"),
        (" 0RECV_B0", "", "rank 1 exchanges 1SEND_B0 with rank 0, which does not take part"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "rank 1 waits at 1F0 for 1RECV_F0, which stands later on the same rank"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "rank 0 waits at 0SEND_F0 for 0F0, which stands later on the same rank"),
        ("0SEND_F0", "0SEND_F0 0SEND_B0", "0SEND_B0 on rank 0 has no other rank to exchange with"),
        ("0GATHER ", "", "0F0 on rank 0: stage 0 is not gathered"),
        ("1GATHER ", "1GATHER 1GATHER ", "1GATHER on rank 1: stage 1 is gathered already"),
        ("0DROP", "0DROP 0DROP", "0DROP on rank 0: stage 0 is not gathered"),
        ("0W0 0REDUCE", "0REDUCE 0W0", "0W0 on rank 0 comes after 0REDUCE"),
        (" 1REDUCE", "", "stage 1 is reduced 0 times; each stage is reduced once"),
    ],
)
def test_faults_of_lowered_schedules(old: str, new: str, message: str) -> None:
    assert message in refuse(LOWERED.replace(old, new, 1))


def test_w_needs_no_weights() -> None:
    check(Schedule.parse(LOWERED))  # 0W0 comes after 0DROP there
    assert "0I0 on rank 0: stage 0 is not gathered" in refuse(LOWERED.replace("0I0 0DROP", "0DROP 0I0"))


def test_forwards_alone_are_complete() -> None:
    check(Schedule.parse("schedule eval microbatches=1 placement=0,1\nrank 0: 0F0\nrank 1: 1F0\n"))


def test_times_of_every_action() -> None:
    timeline = dry_run(Schedule.parse(GOOD), Costs(forward=2.0, input=3.0, weight=1.0, transfer=0.5))
    times = {str(item.action): (item.start, item.end) for item in timeline.timed}
    assert times == {
        "0F0": (0, 2),
        "0F1": (2, 4),
        "1F0": (2.5, 4.5),
        "1B0": (4.5, 8.5),
        "1F1": (8.5, 10.5),
        "1I1": (10.5, 13.5),
        "1W1": (13.5, 14.5),
        "0I0": (9, 12),
        "0W0": (12, 13),
        "0B1": (14, 18),
    }
    assert timeline.makespan == 18 and timeline.period == 18 and timeline.work == (12, 12)
    assert timeline.bubble == 0.5 and timeline.rank_bubble(1) == pytest.approx(1 / 3)
    assert timeline.activations == (2, 1)


def test_costs_for_each_stage() -> None:
    timeline = dry_run(Schedule.parse(GOOD), Costs(forward=(1.0, 4.0), input=(1.0, 1.0), weight=(1.0, 1.0)))
    assert timeline.work == (6, 12)
    assert timeline.bubble == (timeline.period - 12) / 12  # of the busiest rank
    with pytest.raises(ScheduleError, match="1 costs are given, but the schedule has a stage 1"):
        dry_run(Schedule.parse(GOOD), Costs(forward=(1.0,)))


def test_what_stays_between_i_and_w_counts_as_told() -> None:
    text = "schedule one microbatches=2 placement=0\nrank 0: 0F0 0I0 0F1 0I1 0W0 0W1\n"
    assert dry_run(Schedule.parse(text)).activations == (2,)
    assert dry_run(Schedule.parse(text), Costs(pending=0.25)).activations == (1.25,)
    assert dry_run(Schedule.parse(text), Costs(pending=1.5)).activations == (3,)


@pytest.mark.parametrize("name", GENERATORS)
def test_lowering_changes_no_time(name: str) -> None:
    schedule = generate(name, 4, 8)
    for costs in (Costs(), Costs(2.0, 3.0, 1.0, transfer=0.25), Costs(transfer=5.0)):
        plain = {item.action: (item.start, item.end) for item in simulate(schedule, costs).timed}
        lowered = simulate(lower(schedule, gathered=1, costs=costs), costs).timed
        assert {i.action: (i.start, i.end) for i in lowered if i.action.kind.is_compute} == plain


def test_simulating_what_hangs_raises() -> None:
    with pytest.raises(ScheduleError, match="rank 0 waits at 0I0 for 0F0"):
        simulate(Schedule("x", 1, (0,), ((Action.parse("0I0"), Action.parse("0F0")),)))
