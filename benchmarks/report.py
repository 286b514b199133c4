"""Results as tables (terminal and markdown) and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.model import Workload
from benchmarks.stats import LIMIT, Record, Spread, bars, ceilings, check_losses

_QUIET_ENOUGH = 0.05  # share of the machine that others may use before the figures are doubted
_AWAKE = 0.01  # share of a core a contender may use while it is not its turn


@dataclass
class Results:
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    work: Workload
    world: int
    steps: int
    records: dict[str, Record] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # contender: why it did not run
    failed: dict[str, str] = field(default_factory=dict)
    other_load: list[float] = field(default_factory=list)  # per turn, share of the machine used by others


@dataclass(frozen=True)
class Grid:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        rule = "|---|" + "---:|" * (len(self.columns) - 1)
        lines = ["| " + " | ".join(row) + " |" for row in [self.columns, *self.rows]]
        return "\n".join([f"**{self.title}**", "", lines[0], rule, *lines[1:]])

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def grids(results: Results) -> list[Grid]:
    found = [_overview(results), _against_peers(results), _promises(results), _ceilings(results)]
    return [grid for grid in found if grid.rows]


def _overview(results: Results) -> Grid:
    rows = []
    for record in results.records.values():
        ratio = ranged(Spread.of(record.over_limit)) if record.over_limit else "1.00"
        rows.append(
            (
                record.name,
                f"{1e3 * record.step_seconds().median:.0f}",
                ratio,
                _communication(record),
                f"{record.sent_bytes() / 2**20:.1f}",
                f"{record.peak_rss() / 2**20:.0f}",
                f"{record.own_peak() / 2**20:.0f}",
            )
        )
    columns = ("engine", "step, ms", "× alone", "communication", "sent, MiB", "peak, MiB", "model's, MiB")
    return Grid("Per step and rank: median (lowest to highest repeat)", columns, rows)


def _against_peers(results: Results) -> Grid:
    ours = [record for name, record in results.records.items() if name.startswith("retrograde")]
    peers = [record for name, record in results.records.items() if not name.startswith(("retrograde", LIMIT))]
    rows = [(peer.name, *(ranged(peer.over(mine)) for mine in ours)) for peer in peers if ours]
    columns = ("peer's step time ÷", *(mine.name for mine in ours))
    return Grid("Above 1, retrograde is faster", columns, rows)


def _promises(results: Results) -> Grid:
    kept = bars(results.records)
    rows = [(bar.claim, f"{bar.ours:.0f}", f"{bar.theirs:.0f}", "yes" if bar.met else "NO") for bar in kept]
    return Grid("Promises (ms, MiB)", ("claim", "ours", "theirs", "kept"), rows)


def _ceilings(results: Results) -> Grid:
    rows = [
        (each.name, f"{each.ceiling:.2f}", ranged(each.ratio), "yes" if each.met else "NO")
        for each in ceilings(results.records)
    ]
    columns = ("engine", "at most", "median (its interval)", "kept")
    return Grid("Step ÷ alone, with the interval of the median (95%)", columns, rows)


def ranged(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _communication(record: Record) -> str:
    """What a step exchanges: in the engine's own terms if it has them, else the collectives it called."""
    counts = record.exchanges() or record.calls()
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def notes(results: Results) -> list[str]:
    """What a reader has to know before believing the tables."""
    found = [_setting(results)]
    load = sorted(results.other_load)
    if load:
        middle = load[len(load) // 2]
        found.append(
            f"Others used {middle:.0%} of the machine in a median turn, at most {load[-1]:.0%}{doubt(middle)}."
        )
    check = check_losses(results.records)
    if check and len(check.deviation) > 1:
        far = max(check.deviation.values())
        found.append(f"Largest relative difference to {check.reference}'s loss, over all steps: {far:.1e}.")
        found += [f"WRONG LOSS: {name} did not train what the others trained." for name in check.wrong()]
    for record in results.records.values():
        if record.idle_load() > _AWAKE:
            found.append(f"{record.name} used {record.idle_load():.0%} of a core between its turns.")
    found += [f"Not run: {', '.join(names)}: {why}." for why, names in _grouped(results.absent).items()]
    found += [f"Failed: {name}." for name in results.failed]
    return found


def doubt(other_load: float) -> str:
    """What is to be said of figures while others used this share of the machine."""
    return "" if other_load <= _QUIET_ENOUGH else ": not a quiet machine, do not trust these figures"


def _grouped(reasons: dict[str, str]) -> dict[str, list[str]]:
    return {why: [name for name in reasons if reasons[name] == why] for why in reasons.values()}


def _setting(results: Results) -> str:
    work = results.work
    machine = results.machine
    parameters = next((record.ready[0].parameters for record in results.records.values()), 0)
    repeats = max((len(record.over_limit) for record in results.records.values()), default=0)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    cpu = f"{machine['cores']} cores ({machine['cpu']})"
    return (
        f"GPT of {parameters / 1e6:.1f}M parameters, batch {work.batch}×{work.context} per rank, "
        f"fused AdamW, {results.world} ranks (peers over gloo), {cpu}, {versions}; "
        f"{repeats} interleaved repeats of {results.steps} steps, each just after as many of alone."
    )


def wide_console() -> Console:
    """Tables in a log are of no use folded at 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def show(results: Results, console: Console) -> None:
    for grid in grids(results):
        console.print(grid.rich())
    for note in notes(results):
        console.print(note, markup=False, highlight=False)


def markdown(results: Results) -> str:
    parts = [grid.markdown() for grid in grids(results)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(results))]) + "\n"


def as_json(results: Results) -> str:
    return json.dumps(
        {
            "date": results.date,
            "machine": results.machine,
            "versions": results.versions,
            "workload": asdict(results.work),
            "world": results.world,
            "other_load": [round(share, 4) for share in results.other_load],
            "contenders": {name: _plain(record) for name, record in results.records.items()},
            "bars": [{**asdict(bar), "met": bar.met} for bar in bars(results.records)],
            "absent": results.absent,
            "failed": sorted(results.failed),
        },
        indent=1,
    )


def _plain(record: Record) -> dict[str, Any]:
    return {
        "step_seconds": asdict(record.step_seconds()),
        "over_alone": asdict(Spread.of(record.over_limit)) if record.over_limit else None,
        "over_alone_by_repeat": record.over_limit,
        "calls_per_step": record.calls(),
        "exchanges_per_step": record.exchanges(),
        "sent_bytes_per_step": record.sent_bytes(),
        "peak_rss": record.peak_rss(),
        "own_peak": record.own_peak(),
        "idle_load": record.idle_load(),
        "ready": [asdict(ready) for ready in record.ready],
        "turns": [[asdict(rank) for rank in turn] for turn in record.turns],
    }


def save(results: Results, folder: Path, stem: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(as_json(results) + "\n")
    table = folder / f"{stem}.md"
    table.write_text(markdown(results))
    return table
