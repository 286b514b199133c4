"""The text form of actions and schedules: a round trip, and errors that say where."""

import ast
from pathlib import Path

import pytest

import retrograde.pipeline.schedule
from retrograde.errors import ScheduleError
from retrograde.pipeline import Action, ActionKind, Schedule

TEXT = """\
schedule mine microbatches=2 placement=0,1,1,0
rank 0: 0F0 0F1 0SEND_F0 3RECV_F0 3F0 3B0 3REDUCE
rank 1: 1GATHER 1F0 2F0 1I0 1DROP 1W0
"""


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(ActionKind.F, 2, 0)),
        ("0I13", Action(ActionKind.I, 0, 13)),
        ("11W3", Action(ActionKind.W, 11, 3)),
        ("1B0", Action(ActionKind.B, 1, 0)),
        ("1SEND_F2", Action(ActionKind.SEND_F, 1, 2)),
        ("2RECV_B1", Action(ActionKind.RECV_B, 2, 1)),
        ("3GATHER", Action(ActionKind.GATHER, 3)),
        ("3DROP", Action(ActionKind.DROP, 3)),
        ("0REDUCE", Action(ActionKind.REDUCE, 0)),
    ],
)
def test_an_action_is_its_text(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "2GATHER1", "-1F0", "2F0 ", "2SENDF0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_a_schedule_is_its_text() -> None:
    schedule = Schedule.parse(TEXT)
    assert str(schedule) == TEXT
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule.stages == 4 and schedule.microbatches == 2 and schedule.stages_of(0) == (0, 3)
    assert schedule.peer(Action.parse("0SEND_F0")) == 1 and schedule.peer(Action.parse("3SEND_B0")) == 1


def test_a_name_of_several_words_is_read_back() -> None:
    schedule = Schedule.parse(TEXT.replace("mine", "my schedule"))
    assert schedule.name == "my schedule"
    assert Schedule.parse(str(schedule)) == schedule


def test_comments_and_blank_lines_are_skipped() -> None:
    assert Schedule.parse("# by hand\n\n" + TEXT.replace("rank 1", "\n  # two\nrank 1")) == Schedule.parse(TEXT)


def test_schedules_that_differ_in_one_action_are_not_equal() -> None:
    assert Schedule.parse(TEXT.replace("0F0 0F1", "0F1 0F0")) != Schedule.parse(TEXT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("rank 0: 0F0", "line 1: the first line must be 'schedule <name>"),
        (TEXT.replace("0F1", "0X1"), "line 2, column 13: '0X1' is not an action"),
        (TEXT.replace("1GATHER", "1GATHER4"), "line 3, column 9: action 1GATHER4: GATHER has no microbatch"),
        (TEXT.replace("rank 1", "rank 2"), "line 3: expected 'rank 1: ...'"),
        (TEXT.replace("0,1,1,0", "0,1,2,0"), "line 3: the placement names ranks 0 to 2, but there are 2 rank lines"),
    ],
)
def test_errors_name_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    assert message in str(error.value)


ARITHMETIC = (
    "schedule",
    "timeline",
    "dryrun",
    "generators",
    "vshape",
    "list_scheduling",
    "lowering",
    "search",
    "partition",
    "drawing",
    "svg",
)


@pytest.mark.parametrize("module", ARITHMETIC)
def test_schedules_are_arithmetic_and_need_no_torch(module: str) -> None:
    path = Path(retrograde.pipeline.schedule.__file__).with_name(f"{module}.py")
    imported = {
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported
    assert not any((name + ".").startswith("torch.") for name in imported)
    ours = {name for name in imported if name.startswith("retrograde.")} - {"retrograde.errors"}
    assert ours <= {f"retrograde.pipeline.{other}" for other in ARITHMETIC}
