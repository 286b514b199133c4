"""Draws a timeline for people in the terminal. Planned and measured timelines are drawn alike."""

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrograde.pipeline.schedule import ActionKind
from retrograde.pipeline.timeline import Timed, Timeline

# One hue per kind, light for a rank's first stage and dark for its later ones.
COLOURS = {
    ActionKind.F: ("#a8c8f0", "#6f9fd8"),
    ActionKind.I: ("#a9dfbf", "#6fb98f"),
    ActionKind.W: ("#f5d98b", "#dcae45"),
    ActionKind.B: ("#d9b8e8", "#b184c9"),
}
NAMES = {
    ActionKind.F: "forward",
    ActionKind.I: "input gradients",
    ActionKind.W: "weight gradients",
    ActionKind.B: "both gradients",
}
LEAST_WIDTH = 20
MARGINS = 21  # columns of the terminal for rank, idle and peak
BLOCKS = 4


def from_trace(timed: Iterable[Timed], chunks: float = 1.0, pending: float = 1.0) -> Timeline:
    """Make a timeline of measured actions, in any order and by any clock; the first start becomes 0."""
    found = sorted(timed, key=lambda item: (item.start, item.rank))
    zero = found[0].start if found else 0.0
    moved = (Timed(item.rank, item.action, item.start - zero, item.end - zero) for item in found)
    return Timeline(tuple(moved), max((item.rank for item in found), default=-1) + 1, chunks, pending)


def summary(timeline: Timeline) -> str:
    return (
        f"bubble {timeline.bubble:.1%} of the work ({timeline.step_bubble:.1%} for a single step), "
        f"makespan {timeline.makespan:.4g}, peak activations {max(timeline.activations):g} microbatches"
    )


def draw(timeline: Timeline, title: str, width: int = 120) -> RenderableType:
    """Draw a row per rank, time to the right, for printing with rich. Rows wider than `width` columns go on below."""
    cells = max(LEAST_WIDTH, width - MARGINS)
    per_cell = _time_per_cell(timeline, cells)
    columns = max(1, round(short_length([timeline]) / per_cell))
    cells -= cells % columns  # a new block starts where an action may start
    stages = stages_seen(timeline)
    lines = [_line(row, timeline.start, per_cell, columns, stages[rank]) for rank, row in enumerate(timeline.by_rank)]
    longest = max(map(len, lines), default=0)
    parts: list[RenderableType] = [Text(title, style="bold")]
    for left in range(0, longest, cells):
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("rank", justify="right")
        table.add_column(f"from {left * per_cell:.4g}", no_wrap=True, width=min(cells, longest))
        table.add_column("idle" if not left else "", justify="right", width=6)
        table.add_column("peak" if not left else "", justify="right", width=6)
        for rank, line in enumerate(lines):
            figures = (f"{timeline.rank_bubble(rank):.0%}", f"{timeline.activations[rank]:g}") if not left else ()
            table.add_row(str(rank), line[left : left + cells] if len(line) > left else "", *figures)
        parts.append(table)
    return Group(*parts, _legend(timeline), Text(summary(timeline)))


def show(timeline: Timeline, title: str, console: Console | None = None) -> None:
    console = console or Console()
    console.print(draw(timeline, title, console.width))


def stages_seen(timeline: Timeline) -> list[list[int]]:
    """The stages of each rank in order. The position of a stage decides its shade."""
    return [sorted({item.action.stage for item in row}) for row in timeline.by_rank]


def colour(item: Timed, stages: Sequence[int]) -> str:
    shades = COLOURS[item.action.kind]
    return shades[min(stages.index(item.action.stage), len(shades) - 1)]


def _time_per_cell(timeline: Timeline, cells: int) -> float:
    """Choose the scale: short actions have place for their labels, unless that takes more than `BLOCKS` blocks."""
    shortest = short_length([timeline])
    if not shortest:
        return 1.0
    labels = max(len(str(item.action.microbatch)) + 1 for row in timeline.by_rank for item in row)
    least = timeline.makespan / (BLOCKS * cells)
    # A whole number of columns for the shortest action keeps equal actions equally wide.
    columns = min(labels + 1, int(shortest / least + 1e-9))
    return shortest / columns if columns else least


def short_length(timelines: Sequence[Timeline]) -> float:
    """The length that most actions have at least. (The shortest of a measured trace may have next to none.)"""
    items = (item for timeline in timelines for row in timeline.by_rank for item in row)
    lengths = sorted(item.end - item.start for item in items if item.end > item.start)
    return lengths[len(lengths) // 20] if lengths else 0.0


def _labels(item: Timed, stages: Sequence[int]) -> tuple[str, str]:
    """The long and the short label of an action. Lower case says that it is not of the rank's first stage."""
    letter = item.action.kind.value
    letter = letter if item.action.stage == stages[0] else letter.lower()
    return f"{letter}{item.action.microbatch}", letter


def _line(row: Sequence[Timed], zero: float, per_cell: float, columns: int, stages: Sequence[int]) -> Text:
    """Draw a row. `columns`: the width of a short action; if long labels do not fit there, no action gets one."""
    line = Text()
    for item in row:
        left, right = (round((time - zero) / per_cell) for time in (item.start, item.end))
        left = max(left, len(line))
        if right <= left:
            continue  # shorter than half a column
        line.append("·" * (left - len(line)), style="dim")
        long, short = _labels(item, stages)
        label = long if len(long) <= min(right - left, columns) else short
        label = f" {label}" if len(label) < right - left else label
        line.append(label.ljust(right - left), style=f"black on {colour(item, stages)}")
    return line


def _legend(timeline: Timeline) -> Text:
    present = {item.action.kind for row in timeline.by_rank for item in row}
    legend = Text()
    for kind in COLOURS:
        if kind in present:
            legend.append(f" {kind.value} ", style=f"black on {COLOURS[kind][0]}")
            legend.append(f" {NAMES[kind]}  ")
    if max(map(len, stages_seen(timeline)), default=0) > 1:
        legend.append("darker, lower case: the rank's later stage  ", style="dim")
    return legend.append("· idle", style="dim")
