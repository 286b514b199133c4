"""`retrograde doctor` probes, here and now, everything that retrograde assumes of torch and Python.

An assumption that fails at import raises there, with the same words, so that this command does not run.
"""

import argparse
import platform
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from retrograde.cli.commands import Commands
from retrograde.torch_internals.probes import PROBES, TESTED, FailedProbe, Probe, When, describe

_ORDER = list(When)


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="probe what is assumed of torch and Python")
    parser.add_argument("--markdown", action="store_true", help="print what is assumed as a table, and probe nothing")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    probes = in_order(PROBES)
    if arguments.markdown:
        print(as_markdown(probes))
        return 0
    found = [probe.failure() for probe in probes]
    _show(probes, found)
    failed = [FailedProbe(probe, what) for probe, what in zip(probes, found, strict=True) if what is not None]
    print(describe(failed) if failed else f"all {len(probes)} assumptions hold")
    return 1 if failed else 0


def in_order(probes: Sequence[Probe]) -> list[Probe]:
    """Sort probes by when they run."""
    return sorted(probes, key=lambda probe: _ORDER.index(probe.when))


def _show(probes: Sequence[Probe], found: Sequence[str | None]) -> None:
    title = f"torch {torch.__version__}, Python {platform.python_version()}; tested with torch {TESTED}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("result", "assumption", "needed for"):
        table.add_column(column)
    for probe, what in zip(probes, found, strict=True):
        table.add_row("ok" if what is None else "failed", probe.name, probe.needed_for)
    Console().print(table)


def as_markdown(probes: Sequence[Probe]) -> str:
    """The table of docs/design/internals.md."""
    rows = ["| name | assumes | needed for | probed at | if it did not hold and nobody looked |", "|---" * 5 + "|"]
    for probe in probes:
        uses = ", ".join(f"`{name}`" for name in probe.covers)
        cells = (f"**{probe.name}** ({uses})", probe.assumption, probe.needed_for, probe.when.value, probe.otherwise)
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows)
