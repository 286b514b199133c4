"""Pipelines: schedules as data, and the code that runs them."""

from retrograde.pipeline.dryrun import check, dry_run
from retrograde.pipeline.generators import generate
from retrograde.pipeline.lowering import forward_only, lower
from retrograde.pipeline.schedule import Action, ActionKind, Schedule
from retrograde.pipeline.search import schedule_for, search
from retrograde.pipeline.timeline import Costs, Timed, Timeline, simulate
from retrograde.pipeline.torch_csv import read_csv, write_csv

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "Schedule",
    "Timed",
    "Timeline",
    "check",
    "dry_run",
    "forward_only",
    "generate",
    "lower",
    "read_csv",
    "schedule_for",
    "search",
    "simulate",
    "write_csv",
]
