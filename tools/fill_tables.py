"""Put tables from runs between their markers: fill_tables.py NAME FILE, or fill_tables.py benchmarks FOLDER.

`patterns`: FILE is the output of `python -m tests.patterns.table`; it goes into docs/matrix.md.
`overhead`, `window`, `pipeline`: FILE is what `python -m benchmarks.overhead`, `benchmarks.window` or
`benchmarks.pipeline` has written; it goes into docs/benchmarks.md.
`benchmarks`: FOLDER has latest-FIELD.md of three fields, which go into docs/benchmarks.md, and .json beside them, from
which the five figures on the README's first screen are made.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MATRIX = ROOT / "docs" / "matrix.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


FIELDS = ("fp32", "compiled", "bf16")


class Block(NamedTuple):
    page: Path
    name: str  # of its markers


BLOCKS = {
    "patterns": Block(MATRIX, "patterns"),
    **{field: Block(BENCHMARKS, field) for field in FIELDS},
    "overhead": Block(BENCHMARKS, "overhead"),
    "window": Block(BENCHMARKS, "window"),
    "pipeline": Block(BENCHMARKS, "pipeline"),
    "figures": Block(README, "figures"),
}


def filled(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must hold {begin} and {end} once each")
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{text.strip()}\n{end}{tail}"


def fill(which: str, text: str) -> None:
    page, name = BLOCKS[which]
    page.write_text(filled(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    print(f"{page.relative_to(ROOT)}: {name} filled")


# ---- the README's five figures
class Figure(NamedTuple):
    name: str
    contenders: tuple[str, str, str, str, str]  # retrograde's, over gloo, FSDP2's, DeepSpeed's, DDP's; none: ""
    measure: Callable[[dict[str, Any]], str]


def _over_alone(record: dict[str, Any]) -> str:
    return f"{record['over_alone']['median']:.2f}"


def _peak(record: dict[str, Any]) -> str:
    return f"{record['peak_rss'] / 2**20:.0f}"


def _sent(record: dict[str, Any]) -> str:
    return f"{record['sent_bytes_per_step'] / 2**20:.0f}"


_STAGE_3 = ("retrograde-3", "retrograde-3-gloo", "fsdp2-reshard", "deepspeed-3", "ddp")
FIGURES = (
    Figure("step at stage 3 ÷ the same work alone", _STAGE_3, _over_alone),
    Figure(
        "step at stage 3, compiled",
        ("retrograde-3-compiled", "", "fsdp2-reshard-compiled", "", "ddp-compiled"),
        _over_alone,
    ),
    Figure("step at stage 2", ("retrograde-2", "retrograde-2-gloo", "fsdp2", "deepspeed-2", "ddp"), _over_alone),
    Figure("peak memory of a rank, MiB, stage 3", _STAGE_3, _peak),
    Figure("sent per step and rank, MiB, stage 3", _STAGE_3, _sent),
)


def fields_in(folder: Path) -> list[str]:
    """Those that have been run."""
    return [field for field in FIELDS if (folder / f"latest-{field}.json").exists()]


def records_in(folder: Path) -> dict[str, Any]:
    """What was measured of each contender, in the last run of each field."""
    records: dict[str, Any] = {}
    for field in fields_in(folder):
        records |= json.loads((folder / f"latest-{field}.json").read_text(encoding="utf-8"))["contenders"]
    return records


def figures(records: dict[str, Any]) -> str:
    """A row for each figure. FSDP2 at stage 3 reshards after forward; DDP shards nothing."""
    lines = [
        "| measured (2 CPU ranks, one machine) | retrograde | over gloo | FSDP2 | DeepSpeed | DDP |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for figure in FIGURES:
        cells = [figure.measure(records[name]) if name in records else "" for name in figure.contenders]
        lines.append(f"| {figure.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    which, source = sys.argv[1], Path(sys.argv[2])
    if which in ("patterns", "overhead", "window", "pipeline"):
        fill(which, source.read_text(encoding="utf-8"))
        return
    for field in fields_in(source):
        fill(field, (source / f"latest-{field}.md").read_text(encoding="utf-8"))
    fill("figures", figures(records_in(source)))


if __name__ == "__main__":
    main()
