"""The source of retrograde, and small houses with faults to try rules on."""

from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "retrograde"


def modules(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def room_of(path: Path, root: Path) -> str:
    """The first folder below the package, or the name of a top-level module."""
    return path.relative_to(root).with_suffix("").parts[0]


def house(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "retrograde"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root
