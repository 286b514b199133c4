"""The house rules of tests/: who imports whom, who starts processes, where stages are listed, how large things get."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.quick import QUICK, TESTS
from tests.thorough import THOROUGH

FILE_LINES, FUNCTION_LINES = 500, 40

# Tests of programs, which are started as users start them. Ranks are started by processes.py alone.
PROGRAMS = {
    "accelerator/build.py",  # the compiler
    "compile/test_import.py",  # what a new process has imported
    "multiproc/test_benchmarks.py",  # the benchmarks' command line
    "pipeline/test_schedules_drawing.py",  # the project's command line
    "streams/test_device.py",  # an example
    "transport/test_leaving.py",  # how programs end
    "unit/test_torch_internals.py",  # what a new process says when it imports retrograde
}


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    paths = sorted(TESTS.rglob("*.py"))
    return [(path.relative_to(TESTS).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def imports_of_tests(tree: ast.Module) -> list[str]:
    """Modules named test_*: their helpers belong into a module of another name."""
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.startswith("tests.") and ".test_" in name]


def imports_of_starters(tree: ast.Module) -> list[str]:
    """What starts processes; multiprocessing's other parts (its connections, its list of children) do not."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in ("subprocess", "torch.multiprocessing")]
        elif isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "torch.multiprocessing"):
            found.append(node.module)
        elif isinstance(node, ast.Attribute) and node.attr in ("Process", "get_context", "spawn"):
            found.append(node.attr)
    return found


def lists_of_stages(tree: ast.Module) -> list[int]:
    """Lines with `parametrize("stage", (...))`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parametrize"
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == "stage"
    ]


def long_functions(tree: ast.Module) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [each.name for each in functions if (each.end_lineno or 0) - each.lineno + 1 > FUNCTION_LINES]


def test_helpers_are_not_in_test_modules() -> None:
    assert {name: found for name, tree in trees() if (found := imports_of_tests(tree))} == {}


def test_one_way_to_start_ranks() -> None:
    starting = {name for name, tree in trees() if imports_of_starters(tree)}
    assert starting <= PROGRAMS | {"processes.py"}


def test_one_list_of_stages() -> None:
    listing = {name for name, tree in trees() if lists_of_stages(tree)}
    assert listing <= {"stages.py", "unit/test_policy.py"}  # the latter has stages that are none


def test_nothing_is_too_long() -> None:
    assert {name: found for name, tree in trees() if (found := long_functions(tree))} == {}
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_what_is_quick_is_there() -> None:
    assert [name for name in QUICK if not (TESTS / name).exists()] == []


def test_what_is_thorough_is_there() -> None:
    for file, choices in THOROUGH.items():
        source = (TESTS / file).read_text(encoding="utf-8")
        assert [choice.name for choice in choices if f"def {choice.name}(" not in source] == [], file


@pytest.mark.parametrize(
    ("text", "rule"),
    (
        ("from tests.multiproc.test_idioms import both", imports_of_tests),
        ("import tests.multiproc.test_idioms", imports_of_tests),
        ("import subprocess", imports_of_starters),
        ("import torch.multiprocessing as mp", imports_of_starters),
        ("multiprocessing.get_context('spawn')", imports_of_starters),
        ("multiprocessing.Process(target=print)", imports_of_starters),
        ("@pytest.mark.parametrize('stage', (1, 2, 3))\ndef test(stage): ...", lists_of_stages),
        ("def long():\n" + "    pass\n" * FUNCTION_LINES, long_functions),
    ),
)
def test_the_rules_see_what_breaks_them(text: str, rule: object) -> None:
    assert rule(ast.parse(text))  # type: ignore[operator]
    assert not rule(ast.parse("import pytest\nfrom tests.reference import play\n"))  # type: ignore[operator]
