"""Tables and lists of the docs that a program prints: they stand between marks."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def between_marks(page: str, name: str) -> str:
    """What page `page` of docs/ has between the marks `name`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    _, begun, rest = text.partition(f"<!-- {name}:begin -->\n")
    between, ended, _ = rest.partition(f"<!-- {name}:end -->")
    assert begun and ended, f"{page} has no marks {name}"
    return between
