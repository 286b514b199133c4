"""`retrograde schedules list` and `show` draw pipeline schedules in the terminal and as SVG."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from retrograde.cli.commands import Commands
from retrograde.errors import ScheduleError
from retrograde.pipeline import Costs, Schedule, check, dry_run, generate, lower, schedule_for
from retrograde.pipeline.drawing import show
from retrograde.pipeline.generators import GENERATORS
from retrograde.pipeline.svg import svg

SHOW = """\
NAME is one of `retrograde schedules list`, `auto`, or a file with the text of a schedule. Times are of one
microbatch through a rank's whole share of the model; a rank with two stages has half of it in each.
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("schedules", help="draw and check pipeline schedules")
    actions = parser.add_subparsers(metavar="action", required=True)
    listing = actions.add_parser("list", help="the schedules there are, with their figures for a size")
    listing.add_argument("--ranks", type=int, default=4)
    listing.add_argument("--microbatches", type=int, default=8)
    _add_costs(listing)
    listing.set_defaults(run=_list)
    showing = actions.add_parser("show", help="draw a schedule", description=SHOW)
    showing.add_argument("name", metavar="NAME")
    size = showing.add_mutually_exclusive_group()
    size.add_argument("--stages", type=int, help="stages of the model; schedules in a V have two on each rank")
    size.add_argument("--ranks", type=int, help="ranks (default 4)")
    showing.add_argument("--microbatches", type=int, default=8)
    _add_costs(showing)
    showing.add_argument("--limit", type=float, help="auto: the most activations per rank, in microbatches")
    showing.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing to FILE")
    showing.add_argument("--text", action="store_true", help="print the text of the schedule instead")
    showing.add_argument("--lowered", action="store_true", help="the text with transfers, pages and reductions")
    showing.set_defaults(run=_show)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    for name, value in (("forward", 1.0), ("input", 1.0), ("weight", 1.0), ("transfer", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"time of it (default {value:g})")
    parser.add_argument("--pending", type=float, default=1.0, help="share of an activation kept between I and W")


def _costs(arguments: argparse.Namespace) -> Costs:
    return Costs(arguments.forward, arguments.input, arguments.weight, arguments.transfer, arguments.pending)


def _list(arguments: argparse.Namespace) -> int:
    ranks, microbatches = arguments.ranks, arguments.microbatches
    table = Table(title=f"{ranks} ranks, {microbatches} microbatches", title_justify="left", box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for column in ("stages", "bubble", "one step", "activations"):
        table.add_column(column, justify="right")
    table.add_column("about")
    for name, generator in GENERATORS.items():
        schedule = generate(name, ranks, microbatches)
        timeline = dry_run(schedule, _costs(arguments).per_chunk(generator.chunks))
        figures = (f"{timeline.bubble:.1%}", f"{timeline.step_bubble:.1%}", f"{max(timeline.activations):g}")
        table.add_row(name, str(schedule.stages), *figures, generator.about)
    table.add_row("auto", "", "", "", "", "searched for given costs")
    Console().print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    schedule = _schedule(arguments)
    chunks = schedule.stages // len(schedule.ranks)
    timeline = dry_run(schedule, _costs(arguments).per_chunk(chunks))
    title = (
        f"{schedule.name}: {schedule.stages} stages on {len(schedule.ranks)} ranks, "
        f"{schedule.microbatches} microbatches"
    )
    if arguments.svg is not None:
        arguments.svg.write_text(svg([(title, timeline)]), encoding="utf-8")
    if arguments.lowered:
        schedule = lower(schedule, gathered=1)
    if arguments.text or arguments.lowered:
        print(schedule, end="")
    else:
        show(timeline, title)
    return 0


def _schedule(arguments: argparse.Namespace) -> Schedule:
    name = arguments.name
    if name not in GENERATORS and name != "auto" and Path(name).is_file():
        schedule = Schedule.parse(Path(name).read_text(encoding="utf-8"))
        check(schedule)
        return schedule
    if name == "auto" and arguments.stages is not None:
        raise ScheduleError("schedule 'auto' chooses the number of stages itself; give --ranks instead of --stages")
    return schedule_for(name, _ranks(arguments), arguments.microbatches, _costs(arguments), arguments.limit)


def _ranks(arguments: argparse.Namespace) -> int:
    if arguments.stages is None:
        return 4 if arguments.ranks is None else int(arguments.ranks)
    chunks = GENERATORS[arguments.name].chunks if arguments.name in GENERATORS else 1
    if arguments.stages % chunks:
        raise ScheduleError(
            f"schedule '{arguments.name}' has {chunks} stages on each rank; --stages {arguments.stages} "
            f"is not a multiple of {chunks}"
        )
    return int(arguments.stages // chunks)
