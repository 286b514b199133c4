"""Text for people: what a sharded model costs, and what it has done."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from retrograde.layout import Policy
from retrograde.ledger import Kind, Ledger
from retrograde.residency import Unit


def human(nbytes: float) -> str:
    if nbytes == math.inf:
        return "all"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def explain(units: Sequence[Unit], policy: Policy, world: int) -> str:
    """Units, bytes per rank, and collectives for a step of one forward and one backward."""
    stage = 1 if policy.until_step else 2 if policy.keeps_pages else 3
    table = _table(
        f"stage {stage}, {world} rank(s)",
        ("unit", "parameters", "shard/rank", "page", "gradient/rank", "gathers/step", "reductions/step"),
    )
    for unit in units:
        layout = unit.layout
        table.add_row(
            unit.name,
            f"{layout.numel:,}",
            human(layout.shard_bytes),
            human(layout.page_bytes),
            human(layout.shard_bytes if unit.trainable else 0),
            "1" if policy.keeps_pages else "1 to 2",
            "1" if unit.trainable else "0 (frozen)",
        )
    largest = sorted((unit.layout.page_bytes for unit in units), reverse=True)
    total = sum(largest)
    pages = total if policy.keeps_pages else min(total, sum(largest[: 2 if policy.prefetch else 1]) + policy.resident)
    window = sum(unit.layout.page_bytes for unit in units if unit.trainable)
    when = "per step, however many backwards" if policy.until_step else "per backward"
    return _text(table) + (
        f"pages in memory: at most {human(pages)} (the whole model is {human(total)})\n"
        f"reductions: one per unit {when}\n"
        f"a window (no_sync, coalesce) holds up to {human(window)} of unreduced gradients per rank at any world size; "
        "coalesce(budget=...) bounds that\n"
    )


def report(units: Sequence[Unit], ledger: Ledger, rank: int, world: int) -> str:
    """What the ledger has seen so far on this rank."""
    columns = ("unit", "gathers", "bytes read", "drops", "reductions", "bytes put", "joined")
    table = _table(f"ledger of rank {rank} of {world}", columns)
    for name in [unit.name for unit in units]:
        table.add_row(
            name,
            str(ledger.count(Kind.GATHER, name)),
            human(ledger.bytes(Kind.GATHER, name)),
            str(ledger.count(Kind.DROP, name)),
            str(ledger.count(Kind.REDUCE, name)),
            human(ledger.bytes(Kind.REDUCE, name)),
            str(ledger.count(Kind.JOIN, name)),
        )
    return _text(table) + (
        f"meetings: {ledger.count(Kind.AGREE)}; page bytes resident now {human(ledger.resident)}, "
        f"peak {human(ledger.peak)}\n"
    )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == "unit" else "right")
    return table


def _text(table: Table) -> str:
    console = Console(width=120, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
