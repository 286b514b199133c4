"""Reports for people: what a sharded model costs, and what it has done."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from retrograde.layout import Grid, Offload, Policy
from retrograde.ledger import Activity, Ledger
from retrograde.pages import Unit


def human(nbytes: float) -> str:
    """Write a number of bytes in the unit in which it is short."""
    power = min(max(int(nbytes).bit_length() - 1, 0) // 10, 4)
    return f"{nbytes / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def explain(units: Sequence[Unit], policy: Policy, grid: Grid) -> str:
    """The table of units, with bytes per rank and collectives for a step of one forward and one backward."""
    columns = "unit parameters shard/rank page gradient/rank gathers/step reductions/step"
    gathers = "1" if policy.keeps_pages else "1 to 2"
    rows = []
    for unit in units:
        shard = human(unit.shard.nbytes + unit.source_bytes)
        page = human(unit.layout.page_bytes)
        gradient, reductions = (human(unit.shard.nbytes), "1") if any(unit.trained) else (human(0), "0 (frozen)")
        rows.append((unit.name, f"{unit.layout.numel:,}", shard, page, gradient, gathers, reductions))
    largest = sorted((unit.layout.page_bytes for unit in units), reverse=True)
    total = sum(largest)
    pages = total if policy.keeps_pages else min(total, sum(largest[: 2 if policy.prefetch else 1]) + policy.resident)
    waiting = [(unit.layout.padded_numel, policy.waiting(unit.layout.dtype)) for unit in units if any(unit.trained)]
    window = sum(numel * dtype.itemsize for numel, dtype in waiting)
    when = "per step, however many backwards" if policy.until_step else "per backward"
    ranks = f"{grid.world} rank(s)" + f", {grid.replicas} replicas of {grid.shards} shard(s)" * (grid.replicas > 1)
    lines = (
        f"pages in memory: at most {human(pages)} (the whole model is {human(total)})\n"
        f"reductions: one per unit {when}\n"
        f"a window (no_sync, coalesce) holds up to {human(window)} of unreduced gradients per rank at any world size; "
        "coalesce(budget=...) bounds that\n"
    )
    return _table(f"stage {_stage(policy)}, {ranks}", columns, rows) + lines + _offloaded(units, policy)


def _offloaded(units: Sequence[Unit], policy: Policy) -> str:
    if policy.offload is Offload.NOTHING:
        return ""
    said = f"offload of {policy.offload.value}: "
    on_host = [unit for unit in units if unit.leaves_on_host]
    if not on_host:
        return said + "the model computes in the host's memory, so that there is nothing to move\n"
    held = human(sum(unit.shard.nbytes + (unit.source_bytes if unit.source_on_host else 0) for unit in on_host))
    sources = "" if any(unit.source_on_host for unit in on_host) else "; what pages are made of is on the device"
    return said + f"{held} of shards in the host's memory, gradients and optimizer state too{sources}\n"


def _stage(policy: Policy) -> int:
    if policy.until_step:
        return 1
    return 2 if policy.keeps_pages else 3


def report(units: Sequence[Unit], ledger: Ledger, rank: int, world: int) -> str:
    """The table of what this rank's ledger has recorded so far."""
    rows = []
    for unit in units:
        gathers = str(ledger.count(Activity.GATHER, unit.name))
        read = human(ledger.bytes(Activity.GATHER, unit.name))
        drops = str(ledger.count(Activity.DROP, unit.name))
        reductions = str(ledger.count(Activity.REDUCE, unit.name))
        put = human(ledger.bytes(Activity.REDUCE, unit.name))
        joined = str(ledger.count(Activity.JOIN, unit.name))
        rows.append((unit.name, gathers, read, drops, reductions, put, joined))
    return _table(f"ledger of rank {rank} of {world}", "unit gathers read drops reductions put joined", rows) + (
        f"meetings: {ledger.count(Activity.AGREE)}; page bytes resident now {human(ledger.resident)}, "
        f"peak {human(ledger.peak)}\n"
    )


def _table(title: str, columns: str, rows: Sequence[Sequence[str]]) -> str:
    headers = [Column(name, justify="left" if name == "unit" else "right") for name in columns.split()]
    table = Table(*headers, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    # No markup: names of units have brackets.
    return "".join(segment.text for segment in Console(width=120, markup=False).render(table))
