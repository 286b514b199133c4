"""No function is longer than 40 lines, docstring included; decorators above its `def` do not count.

    python tools/check_functions.py

A longer one has an entry in `EXCEPTIONS` that says why. An entry that is no longer needed is a fault too, so that the
table tells the truth. How branched a function may be is ruff's business (C901, in pyproject.toml).
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")
MOST_LINES = 40

# Where it is (path:qualified name), and why it may be longer.
EXCEPTIONS: dict[str, str] = {}


class Function(NamedTuple):
    name: str  # qualified by its classes and the functions around it
    line: int
    lines: int


def functions(source: str) -> Iterator[Function]:
    """Every function of a module, those inside functions too."""
    yield from _functions_in(ast.parse(source), "")


def _functions_in(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield Function(f"{prefix}{child.name}", child.lineno, child.end_lineno - child.lineno + 1)
        yield from _functions_in(child, inner)


def faults(root: Path, exceptions: Mapping[str, str]) -> list[str]:
    """What is too long and has no exception, and exceptions of what is not."""
    found = []
    used = set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            where = path.relative_to(root).as_posix()
            for function in functions(path.read_text(encoding="utf-8")):
                key = f"{where}:{function.name}"
                if function.lines <= MOST_LINES:
                    continue
                used.add(key)
                if key not in exceptions:
                    found.append(
                        f"{where}:{function.line}: {function.name} has {function.lines} lines, at most {MOST_LINES}"
                    )
    for key, reason in exceptions.items():
        if key not in used:
            found.append(f"{key} is an exception ({reason}) that is no longer needed: remove it")
        elif not reason:
            found.append(f"{key} is an exception without a reason")
    return found


def main() -> int:
    found = faults(ROOT, EXCEPTIONS)
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
