"""Nothing is exempt from the formatter, and what is exempt from the limit on branches says why.

    python tools/check_exemptions.py

Faults are comments that switch the formatter off (`fmt: off`, `fmt: skip`, ...), comments that switch all rules off
for a file (`ruff: noqa`), and a `noqa: C901` that is not followed by ` - ` and a reason. One that is no longer needed
is found by ruff itself (RUF100).
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")

SWITCH = re.compile(r"#\s*(fmt|yapf|isort)\s*:\s*\w+|#\s*(ruff|flake8)\s*:\s*(noqa|isort)", re.IGNORECASE)
BRANCHES = re.compile(r"#\s*noqa\b[^#]*\bC901\b(?P<rest>[^#]*)", re.IGNORECASE)
REASON = re.compile(r" - \S")


class Fault(NamedTuple):
    line: int
    text: str


def faults(source: str) -> Iterator[Fault]:
    """The comments of a module that exempt it from a rule in a way that is not allowed."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if SWITCH.search(token.string):
            yield Fault(token.start[0], f"{token.string!r}: every line is formatted and checked")
        branches = BRANCHES.search(token.string)
        if branches is not None and not REASON.match(branches["rest"]):
            yield Fault(token.start[0], f"{token.string!r}: say why, as in 'noqa: C901 - a table of cases'")


def main() -> int:
    count = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for fault in faults(path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{fault.line}: {fault.text}", file=sys.stderr)
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
