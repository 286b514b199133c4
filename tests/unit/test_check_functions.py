"""The limit on the length of functions, and the check that nobody is exempt without saying why."""

from pathlib import Path

import pytest

from tools import check_exemptions, check_functions
from tools.check_functions import EXCEPTIONS, MOST_LINES, Function, faults, functions

FULL = "def f():\n" + "    pass\n" * (MOST_LINES - 1)
LONG = FULL + "    pass\n"


def project(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_this_project_keeps_the_limit() -> None:
    assert faults(check_functions.ROOT, EXCEPTIONS) == []


def test_names_and_lines() -> None:
    source = (
        'class A:\n    @property\n    def b(self):\n        """Doc."""\n\n        async def c():\n            pass\n'
    )
    assert list(functions(source)) == [Function("A.b", 3, 5), Function("A.b.c", 6, 2)]


def test_functions_under_conditions_are_seen() -> None:
    assert list(functions("if True:\n    try:\n        def f(): ...\n    finally:\n        pass\n")) == [
        Function("f", 3, 1)
    ]


@pytest.mark.parametrize("folder", check_functions.FOLDERS)
def test_one_line_too_many_is_found(tmp_path: Path, folder: str) -> None:
    root = project(tmp_path, {f"{folder}/deep/full.py": FULL, f"{folder}/long.py": f"\n{LONG}"})
    assert faults(root, {}) == [f"{folder}/long.py:2: f has 41 lines, at most 40"]


def test_an_exception_is_for_one_function(tmp_path: Path) -> None:
    root = project(tmp_path, {"src/a.py": LONG, "src/b.py": LONG})
    assert faults(root, {"src/a.py:f": "a table"}) == ["src/b.py:1: f has 41 lines, at most 40"]


@pytest.mark.parametrize("key", ["src/a.py:f", "src/a.py:g", "src/gone.py:f"])
def test_an_exception_that_is_not_needed_is_found(tmp_path: Path, key: str) -> None:
    root = project(tmp_path, {"src/a.py": FULL})
    assert faults(root, {key: "a table"}) == [f"{key} is an exception (a table) that is no longer needed: remove it"]


def test_an_exception_needs_a_reason(tmp_path: Path) -> None:
    root = project(tmp_path, {"src/a.py": LONG})
    assert faults(root, {"src/a.py:f": ""}) == ["src/a.py:f is an exception without a reason"]


# Comments are put together here: this file, too, is checked.
HASH = "#"


@pytest.mark.parametrize("switch", ["fmt: off", "fmt:skip", "FMT: on", "yapf: disable", "ruff: noqa", "isort: skip"])
def test_a_switch_of_the_formatter_is_found(switch: str) -> None:
    found = list(check_exemptions.faults(f"x = 1\ny = 2  {HASH} {switch}\n"))
    assert [fault.line for fault in found] == [2]


@pytest.mark.parametrize(
    "comment", ["noqa: C901", "noqa: C901 a table", "noqa: E741, C901", "noqa: C901 - ", "noqa: C901 -a"]
)
def test_branches_without_a_reason_are_found(comment: str) -> None:
    assert len(list(check_exemptions.faults(f"def f():  {HASH} {comment}\n    pass\n"))) == 1


@pytest.mark.parametrize("comment", ["noqa: C901 - a table of cases", "noqa: E741  the literature's letter", "format"])
def test_what_is_allowed(comment: str) -> None:
    assert list(check_exemptions.faults(f'def f():  {HASH} {comment}\n    return "fmt: off"\n')) == []


def test_this_project_is_formatted_throughout() -> None:
    assert check_exemptions.main() == 0
