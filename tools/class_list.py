"""The classes of src/retrograde, by room, at the end of docs/design/glossary.md: python tools/class_list.py

A class is listed with the first sentence of its docstring. tests/unit/test_names.py compares the page with the source.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "retrograde"
PAGE = ROOT / "docs" / "design" / "glossary.md"
BEGIN, END = "<!-- classes:begin -->\n", "<!-- classes:end -->\n"


class Named(NamedTuple):
    room: str
    name: str
    file: str
    sentence: str  # empty: it has no docstring


def classes(root: Path = SOURCE) -> Iterator[Named]:
    """Those of modules, but for private ones."""
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield Named(below.with_suffix("").parts[0], node.name, str(below), first_sentence(node))


def first_sentence(node: ast.ClassDef) -> str:
    paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def tables(found: list[Named]) -> str:
    """By room, in the order of names."""
    text = ""
    for room in sorted({each.room for each in found}):
        rows = sorted(each for each in found if each.room == room)
        text += f"\n**{room}**\n\n| class | file | what it is |\n|---|---|---|\n"
        text += "".join(f"| `{each.name}` | `{each.file}` | {each.sentence} |\n" for each in rows)
    return text


def filled(page: str, text: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}\n{END}{after}"


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(list(classes()))), encoding="utf-8")


if __name__ == "__main__":
    main()
