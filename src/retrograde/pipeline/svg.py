"""Draws timelines as SVG: rows of labelled boxes over a time axis, a legend, figures for each rank.

Several timelines go below each other on one scale, so that a measured one can be compared with its plan.
"""

import math
from collections.abc import Sequence
from html import escape

from retrograde.pipeline.drawing import COLOURS, NAMES, colour, short_length, stages_seen, summary
from retrograde.pipeline.schedule import ActionKind
from retrograde.pipeline.timeline import Timed, Timeline

# Pixels.
ROW = 28
GAP = 6  # between rows
LEFT = 64  # left of the time axis, for the ranks' names
RIGHT = 170  # right of the time axis, for the ranks' figures
TOP = 56  # above the first row, for the title
LABEL_ROOM = 24  # for a short action
LETTER = 6.2
WIDEST = 2400
NARROWEST = 640
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.small{font-size:11px;fill:#555}"
    ".label{font-size:10px;text-anchor:middle;dominant-baseline:central}"
)


def svg(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """One picture of (title, timeline) pairs on a common time axis."""
    longest = max((timeline.makespan for _, timeline in timelines), default=0.0) or 1.0
    width = _width([timeline for _, timeline in timelines], longest)
    scale = width / longest
    parts = []
    y = 0.0
    for title, timeline in timelines:
        parts.append(f'<g transform="translate(0,{_n(y)})">{_panel(title, timeline, scale, width)}</g>')
        y += TOP + timeline.ranks * (ROW + GAP) + 44
    kinds = {item.action.kind for _, timeline in timelines for row in timeline.by_rank for item in row}
    parts.append(f'<g transform="translate({LEFT},{_n(y)})">{_legend(kinds)}</g>')
    across = _n(LEFT + width + RIGHT)
    down = _n(y + 36)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" '
        f'viewBox="0 0 {across} {down}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _width(timelines: Sequence[Timeline], longest: float) -> float:
    """Wide enough for labels in short actions, within reason."""
    wanted = longest / (short_length(timelines) or longest) * LABEL_ROOM
    return min(WIDEST, max(NARROWEST, wanted))


def _panel(title: str, timeline: Timeline, scale: float, width: float) -> str:
    bottom = TOP + timeline.ranks * (ROW + GAP)
    parts = [
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>',
        f'<text class="small" x="{LEFT}" y="40">{escape(summary(timeline))}</text>',
        f'<text class="small" x="{_n(LEFT + width + 12)}" y="{TOP - 6}">idle</text>',
        f'<text class="small" x="{_n(LEFT + width + 60)}" y="{TOP - 6}">peak activations</text>',
        _axis(timeline.makespan, scale, bottom),
    ]
    stages = stages_seen(timeline)
    for rank, row in enumerate(timeline.by_rank):
        y = TOP + rank * (ROW + GAP)
        middle = y + ROW / 2 + 4
        length = timeline.makespan * scale
        parts += [
            f'<text x="{LEFT - 10}" y="{_n(middle)}" text-anchor="end">rank {rank}</text>',
            f'<rect x="{LEFT}" y="{_n(y)}" width="{_n(length)}" height="{ROW}" fill="#f0f0f0"/>',
            *(_box(item, timeline.start, scale, y, stages[rank]) for item in row),
            f'<text x="{_n(LEFT + width + 12)}" y="{_n(middle)}">{timeline.rank_bubble(rank):.0%}</text>',
            f'<text x="{_n(LEFT + width + 60)}" y="{_n(middle)}">{timeline.activations[rank]:g}</text>',
        ]
    return "".join(parts)


def _box(item: Timed, zero: float, scale: float, y: float, stages: Sequence[int]) -> str:
    x = LEFT + (item.start - zero) * scale
    width = (item.end - item.start) * scale
    hint = f"{item.action}: {item.start - zero:g} to {item.end - zero:g}"
    box = (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{ROW}" fill="{colour(item, stages)}" '
        f'stroke="white" stroke-width="0.8"><title>{escape(hint)}</title></rect>'
    )
    labels = (f"{item.action.kind.value}{item.action.microbatch}", str(item.action.microbatch))
    label = next((text for text in labels if LETTER * len(text) + 2 <= width), None)
    if label is None:
        return box
    middle = f'x="{_n(x + width / 2)}" y="{_n(y + ROW / 2)}"'
    return f'{box}<text class="label" {middle} pointer-events="none">{label}</text>'


def _axis(makespan: float, scale: float, y: float) -> str:
    step = _nice_step(makespan)
    parts = [f'<path d="M{LEFT} {_n(y + 4)}h{_n(makespan * scale)}" stroke="#888"/>']
    for number in range(int(makespan / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        parts.append(
            f'<path d="M{_n(x)} {_n(y + 4)}v5" stroke="#888"/>'
            f'<text class="small" x="{_n(x)}" y="{_n(y + 22)}" text-anchor="middle">{number * step:g}</text>'
        )
    return "".join(parts)


def _nice_step(makespan: float) -> float:
    """1, 2 or 5 times a power of ten, for about ten ticks."""
    if makespan <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(makespan / 10))
    return next(factor * power for factor in (1, 2, 5, 10) if makespan / (factor * power) <= 12)


def _legend(kinds: set[ActionKind]) -> str:
    parts = []
    x = 0
    for kind in COLOURS:
        if kind in kinds:
            light, dark = COLOURS[kind]
            text = f"{kind.value}: {NAMES[kind]}"
            parts.append(
                f'<rect x="{x}" y="0" width="12" height="14" fill="{light}"/>'
                f'<rect x="{x + 12}" y="0" width="12" height="14" fill="{dark}"/>'
                f'<text x="{x + 30}" y="11">{text}</text>'
            )
            x += 30 + 7 * len(text) + 16
    parts.append(f'<text class="small" x="{x}" y="11">numbers: microbatches; darker: the rank\'s later stage</text>')
    return "".join(parts)


def _n(value: float) -> str:
    """Write a number with two decimals, which are finer than any screen and keep the file small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
