"""What benchmarks that are measured in rounds share: options, and where their tables go."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.crew import ENVIRONMENT, CrewError
from benchmarks.report import Grid, wide_console
from benchmarks.run import RESULTS


@dataclass(frozen=True)
class Tables:
    """What was found, for people and for programs."""

    grids: Sequence[Grid]
    notes: Sequence[str]
    json: str

    def markdown(self) -> str:
        parts = [grid.markdown() for grid in self.grids]
        return "\n\n".join([*parts, "\n".join(f"- {note}" for note in self.notes)]) + "\n"

    def show(self, console: Console) -> None:
        for grid in self.grids:
            console.print(grid.rich())
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def write(self, table: Path) -> None:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(self.markdown())
        table.with_suffix(".json").write_text(self.json + "\n")


def options_of(name: str, description: str | None, rounds: int, patience: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="in each of which everything is measured once")
    parser.add_argument("--tiny", action="store_true", help="something small, few rounds: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--patience", type=float, default=patience, help="seconds a rank may take to answer")
    return parser


def table_of(name: str, options: argparse.Namespace) -> Path:
    """Where its results are."""
    folder: Path = options.out
    return folder / f"{'tiny' if options.tiny else 'latest'}-{name}.md"


def publish(measure: Callable[[Console], Tables], table: Path) -> int:
    """Measure, show and write. Returns what the process ends with."""
    os.environ.update(ENVIRONMENT)
    console = wide_console()
    try:
        found = measure(console)
    except CrewError as error:
        console.print(f"FAILED {error}", markup=False, highlight=False)
        return 1
    found.show(console)
    found.write(table)
    console.print(f"written: {table} and .json beside", highlight=False)
    return 0
