"""One word, one meaning: no class or type alias of src/retrograde is defined in two modules."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.unit.house import SOURCE, house, modules, room_of
from tools.class_list import classes, filled, tables

# Each with its reason.
EXCEPTIONS: dict[str, str] = {}


def definitions(tree: ast.Module) -> Iterator[str]:
    """Names of classes at any depth, and of type aliases of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for statement in tree.body:
        # An alias may stand under `if TYPE_CHECKING`.
        for part in [statement, *(statement.body if isinstance(statement, ast.If) else [])]:
            match part:
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    if is_type_name(name):
                        yield name


def is_type_name(name: str) -> bool:
    """Words with capitals, as classes have them. One letter is a type variable, capitals alone are a constant."""
    bare = name.lstrip("_")
    return bare[:1].isupper() and not bare.isupper()


def faults(root: Path, exceptions: Mapping[str, str]) -> list[str]:
    homes: dict[str, set[str]] = {}
    for path in modules(root):
        for name in definitions(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            homes.setdefault(name, set()).add(str(path.relative_to(root)))
    several = {name: sorted(places) for name, places in homes.items() if len(places) > 1}
    found = [f"{name} is defined in {', '.join(places)}" for name, places in several.items() if name not in exceptions]
    found += [f"{name} is an exception that is no longer needed" for name in exceptions if name not in several]
    return found


def test_one_word_has_one_meaning() -> None:
    assert faults(SOURCE, EXCEPTIONS) == []


# The rule itself: it must be able to fail.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("class Plan: ...", "class Plan: ..."),
        ("class Plan: ...", "Plan = tuple[int, ...]"),
        ("Plan = dict[str, int]", "Plan: object = int | None"),
        ("class _Plan: ...", "def f():\n    class _Plan: ..."),
        ("class Plan: ...", "if TYPE_CHECKING:\n    Plan = int"),
    ],
)
def test_a_word_with_two_meanings_is_found(tmp_path: Path, one: str, other: str) -> None:
    found = faults(house(tmp_path, {"layout/a.py": one, "pages/b.py": other}), {})
    assert len(found) == 1 and found[0].endswith("Plan is defined in layout/a.py, pages/b.py")


@pytest.mark.parametrize(
    "text", ["from retrograde.layout.a import Plan", "T = 1", "MOST = 2", "plan = 3", "def Plan(): ...", "x.Plan = 1"]
)
def test_a_use_is_not_a_meaning(tmp_path: Path, text: str) -> None:
    source = "class Plan: ...\nT = 1\nMOST = 2\nplan = 3"
    assert faults(house(tmp_path, {"layout/a.py": source, "pages/b.py": text}), {}) == []


def test_an_exception_that_is_not_needed_is_found(tmp_path: Path) -> None:
    root = house(tmp_path, {"layout/a.py": "class Plan: ...", "pages/b.py": "class Plan: ..."})
    assert faults(root, {"Plan": "two plans"}) == []
    assert faults(root, {"Plan": "two plans", "Map": "two maps"}) == ["Map is an exception that is no longer needed"]


# The glossary of the words that one would not guess.

GLOSSARY = Path(__file__).parents[2] / "docs" / "design" / "glossary.md"
ENTRY = re.compile(r"- \*\*(?P<word>[^*]+)\*\* \((?P<rooms>[\w, ]+)\): \S")


def glossary_faults(text: str, rooms: set[str]) -> list[str]:
    """Entries that cannot be read, stand in the wrong place, come twice, or name a room that is not there."""
    found = []
    before = ""
    for line in text.splitlines():
        if not line.startswith("- "):
            continue
        entry = ENTRY.match(line)
        if entry is None:
            found.append(f"{line!r} is not '- **word** (room): what it means'")
            continue
        word = entry["word"]
        if (word.lower(), word.islower()) <= (before.lower(), before.islower()):
            found.append(f"{word} stands after {before}")
        found += [f"{word}: there is no room {room}" for room in entry["rooms"].split(", ") if room not in rooms]
        before = word
    return found


def test_the_glossary() -> None:
    rooms = {room_of(path, SOURCE) for path in modules(SOURCE)}
    assert glossary_faults(GLOSSARY.read_text(encoding="utf-8"), rooms) == []


@pytest.mark.parametrize(
    "text",
    [
        "- **b** (pages): b.\n- **a** (pages): a.",
        "- **a** (pages): a.\n- **a** (pages): again.",
        "- **a** (attic): a.",
        "- **a** (pages):",
        "- a: a.",
    ],
)
def test_a_fault_of_the_glossary_is_found(text: str) -> None:
    assert len(glossary_faults(text, {"pages"})) == 1


# Its list of classes.


def test_the_glossary_has_every_class() -> None:
    found = list(classes())
    assert [each.name for each in found if not each.sentence] == []
    text = GLOSSARY.read_text(encoding="utf-8")
    assert filled(text, tables(found)) == text, "python tools/class_list.py"


def test_classes_are_listed_with_their_first_sentence(tmp_path: Path) -> None:
    text = 'class Plan:\n    """What is to be\n    done. And more."""\nclass _Own: ...\nclass Bare: ...\n'
    found = list(classes(house(tmp_path, {"layout/a.py": text})))
    assert [(each.name, each.sentence) for each in found] == [("Plan", "What is to be done."), ("Bare", "")]
    assert "| `Plan` | `layout/a.py` | What is to be done. |" in tables(found)
