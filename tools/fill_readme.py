"""Put a table from a run between its markers in README.md: fill_readme.py NAME FILE."""

import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def filled(readme: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"README.md must hold {begin} and {end} once each")
    head, _, rest = readme.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{text.strip()}\n{end}{tail}"


def main() -> None:
    name, source = sys.argv[1:]
    text = Path(source).read_text(encoding="utf-8")
    README.write_text(filled(README.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    print(f"README.md: {name} table filled from {source}")


if __name__ == "__main__":
    main()
