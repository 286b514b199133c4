"""Lowering passes: what they add, where, and that the transfers can never hang."""

import itertools

import pytest

from retrograde.errors import ScheduleError
from retrograde.pipeline import Action, ActionKind, Costs, Schedule, check, forward_only, generate, lower
from retrograde.pipeline.generators import GENERATORS
from retrograde.pipeline.lowering import add_pages, add_reductions, add_transfers

COSTS = [Costs(), Costs(2.0, 3.0, 1.0, transfer=0.5), Costs(transfer=7.0), Costs(0.0, 0.0, 0.0)]
SIZES = [(1, 3), (2, 5), (3, 6), (4, 8), (5, 7)]

GOLDEN_ZB_V = """\
schedule zb-v microbatches=1 placement=0,1,1,0
rank 0: 0GATHER 0F0 0SEND_F0 0DROP 3GATHER 3RECV_F0 3F0 3I0 3SEND_B0 3DROP 3W0 3REDUCE 0GATHER 0RECV_B0 0I0 0DROP 0W0 0REDUCE
rank 1: 1GATHER 1RECV_F0 1F0 1DROP 2GATHER 2F0 2SEND_F0 2RECV_B0 2I0 2DROP 2W0 2REDUCE 1GATHER 1I0 1SEND_B0 1DROP 1W0 1REDUCE
"""  # noqa: E501


def computes(schedule: Schedule) -> list[list[Action]]:
    return [[action for action in actions if action.kind.is_compute] for actions in schedule.ranks]


def runs_with_waiting_sends(schedule: Schedule) -> bool:
    """Plays the lists with transfers that wait for the other end: a send and its receive happen together."""
    position = [0] * len(schedule.ranks)

    def head(rank: int) -> Action | None:
        actions = schedule.ranks[rank]
        return actions[position[rank]] if position[rank] < len(actions) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(schedule.ranks)):
            while (action := head(rank)) is not None:
                if action.kind.is_transfer:
                    step = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1
                    peer = schedule.peer(action)
                    twin = Action(OTHER_END[action.kind], action.stage + step, action.microbatch)
                    if head(peer) != twin:
                        break
                    position[peer] += 1
                position[rank] += 1
                moved = True
    return all(head(rank) is None for rank in range(len(schedule.ranks)))


OTHER_END = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_B: ActionKind.SEND_B,
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", GENERATORS)
def test_lowered_schedules_are_valid_and_cannot_hang(name: str, costs: Costs) -> None:
    for p, m in SIZES:
        schedule = generate(name, p, m)
        lowered = lower(schedule, gathered=1, costs=costs)
        check(lowered)
        assert computes(lowered) == computes(schedule)
        assert runs_with_waiting_sends(lowered)
        assert Schedule.parse(str(lowered)) == lowered


def test_the_rendezvous_check_can_fail() -> None:
    text = "schedule x microbatches=1 placement=0,1\nrank 0: 0RECV_B0 0SEND_F0\nrank 1: 1RECV_F0 1SEND_B0\n"
    assert not runs_with_waiting_sends(Schedule.parse(text))


@pytest.mark.parametrize("name", GENERATORS)
def test_one_message_for_each_crossing_and_direction(name: str) -> None:
    schedule = generate(name, 4, 8)
    lowered = add_transfers(schedule)
    crossings = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    for kind in OTHER_END:
        assert sum(action.kind is kind for _, action in lowered.actions()) == crossings * 8


def test_golden_lowering() -> None:
    assert str(lower(generate("zb-v", 2, 1), gathered=1)) == GOLDEN_ZB_V


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("name", GENERATORS)
def test_pages(name: str, resident: int) -> None:
    schedule = add_pages(generate(name, 3, 6), resident)
    check(schedule)
    gathers = 0
    for actions in schedule.ranks:
        present: set[int] = set()
        for position, action in enumerate(actions):
            if action.kind is ActionKind.GATHER:
                present.add(action.stage)
                gathers += 1
                assert actions[position + 1].kind in (ActionKind.F, ActionKind.I, ActionKind.B)
            if action.kind is ActionKind.DROP:
                present.remove(action.stage)
                assert actions[position - 1].kind in (ActionKind.F, ActionKind.I, ActionKind.B)  # not held for a W
            assert len(present) <= resident
        assert not present
    if resident >= GENERATORS[name].chunks:
        assert gathers == schedule.stages  # once each: it never has to make room


def test_one_resident_is_gathered_at_every_change_of_stage() -> None:
    schedule = generate("zb-v", 4, 8)
    uses = [[action.stage for action in actions if action.kind is not ActionKind.W] for actions in schedule.ranks]
    changes = sum(1 + sum(a != b for a, b in itertools.pairwise(stages)) for stages in uses)
    assert str(add_pages(schedule, 1)).count("GATHER") == changes > 8
    assert str(add_pages(schedule, 2)).count("GATHER") == 8


def test_the_page_needed_last_makes_room() -> None:
    text = "schedule x microbatches=2 placement=0,0,0\nrank 0: 0F0 1F0 2F0 2B0 1B0 0F1 1F1 2F1 2B1 1B1 0B0 0B1\n"
    lowered = str(add_pages(Schedule.parse(text), 2)).splitlines()[1]
    # At 2F0 stage 1 is needed sooner than stage 0; at 0F1 it is sooner than stage 2; and so on.
    assert lowered == (
        "rank 0: 0GATHER 0F0 0DROP 1GATHER 1F0 2GATHER 2F0 2B0 2DROP 1B0 0GATHER 0F1 0DROP 1F1 2GATHER 2F1 2B1 2DROP "
        "1B1 1DROP 0GATHER 0B0 0B1 0DROP"
    )


def test_no_room_for_any_page_is_refused() -> None:
    with pytest.raises(ScheduleError, match="gathered=0"):
        add_pages(generate("zb-v", 2, 2), 0)


@pytest.mark.parametrize("name", GENERATORS)
def test_one_reduction_per_stage_after_its_last_w(name: str) -> None:
    for actions in add_reductions(generate(name, 3, 6)).ranks:
        for position, action in enumerate(actions):
            if action.kind is ActionKind.REDUCE:
                assert (
                    actions[position - 1].kind in (ActionKind.W, ActionKind.B)
                    and actions[position - 1].stage == action.stage
                )
                assert not any(a.stage == action.stage for a in actions[position + 1 :])
    assert str(add_reductions(generate(name, 3, 6))).count("REDUCE") == 3 * GENERATORS[name].chunks


@pytest.mark.parametrize("name", GENERATORS)
def test_forward_only(name: str) -> None:
    schedule = forward_only(generate(name, 4, 6))
    check(lower(schedule, gathered=1))
    assert {action.kind for _, action in schedule.actions()} == {ActionKind.F}
