"""What documents and docstrings name is there: files, links between documents, headings that links point to.

docs/log.md and CHANGELOG.md tell what was, and may name what is gone."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.house import SOURCE, modules

ROOT = Path(__file__).parents[2]
HISTORY = {ROOT / "docs" / "log.md", ROOT / "CHANGELOG.md"}
HOMES = (ROOT, SOURCE, *(ROOT / name for name in ("tests", "benchmarks", "examples", "tools")))

FILE = re.compile(r"(?<![\w./<-])([\w-]+(?:/[\w-]+)+\.(?:py|md|txt|json))\b")
MODULE = re.compile(r"(?<![\w./<-])\w+\.py\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    return sorted(path for path in found if path not in HISTORY)


def absent_files(text: str) -> list[str]:
    """Paths with a folder, such as `pages/page.py`, that no home has; modules that no folder has."""
    found = [name for name in FILE.findall(text) if not any((home / name).is_file() for home in HOMES)]
    return found + [name for name in MODULE.findall(text) if name not in module_names()]


@functools.cache
def module_names() -> set[str]:
    return {path.name for home in HOMES[1:] for path in home.rglob("*.py")}


def dead_links(path: Path, text: str) -> Iterator[str]:
    """Links to other files of this repository, and to headings of documents."""
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, heading = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (heading and heading not in headings(target.read_text(encoding="utf-8"))):
            yield link


def headings(text: str) -> set[str]:
    """As GitHub makes anchors of them."""
    lines = [line.lstrip("#").strip() for line in FENCE.sub("", text).splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def comments(path: Path) -> list[str]:
    return re.findall(r"#.*", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_documents_name_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert absent_files(LINK.sub("]", text)) == []
    assert list(dead_links(path, text)) == []


def test_files_that_the_code_names_exist() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): absent
        for path in modules(SOURCE)
        if (absent := absent_files("\n".join([*docstrings(path), *comments(path)])))
    }
    assert found == {}


# The rules themselves: they must be able to fail.


def test_what_is_absent_is_found(tmp_path: Path) -> None:
    assert absent_files("see pages/page.py, pages/attic.py and `tests/harness.py`") == ["pages/attic.py"]
    assert absent_files("see page.py and attic.py") == ["attic.py"]
    here = tmp_path / "a.md"
    here.write_text("# A heading, here\n")
    links = "[a](a.md) [b](b.md) [c](#a-heading-here) [d](a.md#nowhere) [e](https://example.org/f.md)"
    assert list(dead_links(here, links)) == ["b.md", "a.md#nowhere"]
