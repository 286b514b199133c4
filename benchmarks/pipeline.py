"""`python -m benchmarks.pipeline`: retrograde's pipelines beside torch.distributed.pipelining, at a size that tells.

A GPT of 120M parameters on four ranks, by three schedules that both have, in fp32 and bf16, with and without activation
checkpointing. Memory is counted in a step of its own, exactly: see pipeline_rank.py. Then both engines take turns, one
step each in a round, and ratios are between steps of one round. The ranks are more than the cores of a small machine,
so that step times say what a step costs, not how long it waits; waiting is measured by stages that sleep (bubble.py).

A run measures what `--schedules`, `--precisions` and `--checkpointing` choose, and adds it to what the results have."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median

from benchmarks import bubble, meters
from benchmarks.crew import ENVIRONMENT, Crew, CrewError
from benchmarks.pipeline_rank import (
    FULL,
    SMOKE,
    TORCHS,
    Build,
    Case,
    Engine,
    Look,
    PipelineRank,
    Seen,
    Time,
    Timed,
    Work,
)
from benchmarks.report import Grid, doubt, ranged, wide_console
from benchmarks.run import RESULTS, machine, versions
from benchmarks.stats import Spread

_WORLD = 4
_MIB = 2**20
_PRECISIONS = ("fp32", "bf16")
_CHECKPOINTING = ("without", "with")
_SAME = 1e-2  # relative, of gradient norms: engines sum microbatches in other orders, in bf16 too
_LESS = {False: 0.10, True: 0.50}  # how far our peak is to be below torch's, without and with checkpointing


@dataclass
class Figures:
    """Of one engine in one case. Bytes by rank; seconds and others' share of the machine by round."""

    peak: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of each rank's gradients
    other_load: list[float] = field(default_factory=list)

    def see(self, ranks: Sequence[Seen]) -> None:
        self.peak = [rank.peak for rank in ranks]
        self.after = [rank.after for rank in ranks]

    def add(self, ranks: Sequence[Timed], other_load: float) -> None:
        """A step ends when its last rank ends it."""
        self.seconds.append(max(rank.seconds for rank in ranks))
        self.resident = [max(pair) for pair in zip(self.resident or [0] * len(ranks), _resident(ranks), strict=True)]
        self.norms = [rank.gradient_norm for rank in ranks]
        self.other_load.append(other_load)


def _resident(ranks: Sequence[Timed]) -> list[int]:
    return [rank.resident for rank in ranks]


Pair = dict[Engine, Figures]


@dataclass
class Results:
    setting: str = ""
    cases: dict[Case, Pair] = field(default_factory=dict)
    bubbles: list[bubble.Measured] = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> Results:
        """What earlier runs have measured."""
        if not path.exists():
            return Results()
        stored = json.loads(path.read_text())
        cases = {
            Case(**{each.name: entry[each.name] for each in fields(Case)}): {
                engine: Figures(**entry["engines"][engine]) for engine in Engine
            }
            for entry in stored["cases"]
        }
        return Results(stored["setting"], cases, [bubble.Measured(**entry) for entry in stored["bubbles"]])

    def as_json(self) -> str:
        cases = [
            {**asdict(case), "engines": {engine: asdict(figures) for engine, figures in pair.items()}}
            for case, pair in self.cases.items()
        ]
        bubbles = [asdict(each) for each in self.bubbles]
        return json.dumps({"setting": self.setting, "cases": cases, "bubbles": bubbles}, indent=1)


# ---- measuring
class Contest:
    """Both engines' ranks, alive at once; those of one awake."""

    def __init__(self, patience: float, logs: Path, stack: ExitStack) -> None:
        self._crews = {
            engine: stack.enter_context(Crew(engine, None, _WORLD, logs, patience, PipelineRank)) for engine in Engine
        }

    def measure(self, work: Work, rounds: int) -> Pair:
        pair = {engine: Figures() for engine in Engine}
        for engine, crew in self._crews.items():
            crew.ask(Build(work))
            pair[engine].see(crew.ask(Look()))
        for number in range(rounds):
            order = list(Engine) if number % 2 == 0 else list(Engine)[::-1]
            for engine in order:
                _take_turn(self._crews[engine], pair[engine])
        _check_same(work.case, pair)
        return pair


def _take_turn(crew: Crew, figures: Figures) -> None:
    busy, began = meters.machine_busy_seconds(), time.monotonic()
    ranks: list[Timed] = crew.ask(Time())
    others = meters.machine_busy_seconds() - busy - sum(rank.cpu_seconds for rank in ranks)
    figures.add(ranks, max(0.0, others / (time.monotonic() - began) / (os.cpu_count() or 1)))


def _check_same(case: Case, pair: Pair) -> None:
    """A comparison of two that did not compute the same would say nothing."""
    for rank, (mine, theirs) in enumerate(zip(pair[Engine.OURS].norms, pair[Engine.TORCH].norms, strict=True)):
        if abs(mine - theirs) > _SAME * theirs:
            raise CrewError(f"{case}: the gradients of rank {rank} have norm {mine:g}, those of torch {theirs:g}")


def _in_words(case: Case, pair: Pair) -> str:
    peaks = ", ".join(f"{engine} {max(pair[engine].peak) / _MIB:.1f}" for engine in Engine)
    steps = ", ".join(f"{engine} {median(pair[engine].seconds):.1f}" for engine in Engine)
    return f"{', '.join(_name(case))}: peak MiB {peaks}; step s {steps}"


# ---- results
def grids(results: Results) -> list[Grid]:
    found = [_memory(results), _times(results), _bubbles(results)]
    return [grid for grid in found if grid.rows]


def _sorted(results: Results) -> list[tuple[Case, Pair]]:
    order = list(TORCHS)
    return sorted(
        results.cases.items(),
        key=lambda entry: (order.index(entry[0].schedule), entry[0].precision != "fp32", *_manner(entry[0])),
    )


def _manner(case: Case) -> tuple[bool, bool]:
    return case.checkpointed, case.pending is not None


def _name(case: Case) -> tuple[str, str, str]:
    if case.pending is not None:
        return case.schedule, case.precision, f"yes, pending={case.pending}"
    return case.schedule, case.precision, "yes" if case.checkpointed else "no"


def below(pair: Pair) -> float:
    """How far our peak is below torch's, on the rank that needs most."""
    return 1 - max(pair[Engine.OURS].peak) / max(pair[Engine.TORCH].peak)


def _memory(results: Results) -> Grid:
    rows = []
    for case, pair in _sorted(results):
        cells = [_by_rank(pair[engine].peak) for engine in (Engine.TORCH, Engine.OURS)]
        resident = [_by_rank(pair[engine].resident) for engine in (Engine.TORCH, Engine.OURS)]
        wanted = _LESS[case.checkpointed]
        kept = "" if case.schedule == "1f1b" else f" ({'reached' if below(pair) >= wanted else 'NOT reached'})"
        rows.append((*_name(case), *cells, f"{below(pair):.0%}{kept}", *resident))
    columns = ("schedule", "precision", "checkpointed", "torch, MiB", "retrograde, MiB", "less by")
    title = "Peak of tensors in a step: the largest rank (ranks 0 to 3); and of the process beyond what it had before"
    return Grid(title, (*columns, "torch, process", "retrograde, process"), rows)


def _by_rank(sizes: Sequence[int]) -> str:
    return f"**{max(sizes) / _MIB:.0f}** ({' '.join(f'{each / _MIB:.0f}' for each in sizes)})"


def _times(results: Results) -> Grid:
    rows = []
    for case, pair in _sorted(results):
        mine, theirs = pair[Engine.OURS].seconds, pair[Engine.TORCH].seconds
        ratio = Spread.of([own / other for own, other in zip(mine, theirs, strict=True)])
        rows.append((*_name(case), f"{median(theirs):.2f}", f"{median(mine):.2f}", ranged(ratio)))
    columns = ("schedule", "precision", "checkpointed", "torch, s", "retrograde, s", "retrograde ÷ torch")
    return Grid("Time of a step: median, and of the ratios (lowest to highest round)", columns, rows)


def _bubbles(results: Results) -> Grid:
    rows = [
        (each.name, each.engine, bubble.shares(each.bubbles), bubble.shares(each.steps), _in_theory(each))
        for each in results.bubbles
    ]
    columns = ("schedule", "engine", "bubble", "a single step", "in theory")
    return Grid("Bubble, where every action sleeps for its time: median (lowest to highest round)", columns, rows)


def _in_theory(each: bubble.Measured) -> str:
    return f"{each.theory[0]:.1%}, {each.theory[1]:.1%}"


def notes(results: Results) -> list[str]:
    loads = [load for pair in results.cases.values() for figures in pair.values() for load in figures.other_load]
    rounds = [len(figures.seconds) for pair in results.cases.values() for figures in pair.values()]
    said = [results.setting]
    if loads:
        load = median(loads)
        said.append(
            f"{min(rounds)} rounds at least. Others used {load:.0%} of the machine in a median step{doubt(load)}."
        )
    said.append(
        "Tensors are counted exactly, whatever else runs: all storages but those of parameters, gradients and receive "
        "buffers. torch's receive buffers, one for every microbatch, are in the process's figure only, beside what the "
        "allocator keeps."
    )
    return said


def markdown(results: Results) -> str:
    parts = [grid.markdown() for grid in grids(results)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(results))]) + "\n"


def _setting(work: Work, parameters: int) -> str:
    cpu = machine()
    model = work.model
    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "deepspeed")
    return (
        f"GPT of {parameters / 1e6:.0f}M parameters ({model.layers} blocks of width {model.width}), "
        f"{work.microbatches} microbatches of 1×{model.context} tokens, {_WORLD} ranks, one thread each, "
        f"{cpu['cores']} cores ({cpu['cpu']}), {installed}."
    )


# ---- the command line
def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--schedules", default=",".join(TORCHS), help="with commas between; none: only the bubble")
    parser.add_argument("--precisions", default=",".join(_PRECISIONS))
    parser.add_argument("--checkpointing", default=",".join(_CHECKPOINTING), help=", ".join(_CHECKPOINTING))
    parser.add_argument("--bubble", action="store_true", help="measure stages that sleep too")
    parser.add_argument("--rounds", type=int, default=3, help="in each of which both engines do one step")
    parser.add_argument("--tiny", action="store_true", help="a small model, one round: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a rank may take to answer")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace) -> list[Case]:
    return [
        Case(schedule, precision, checkpointing == "with")
        for schedule in options.schedules.split(",")
        if schedule
        for precision in options.precisions.split(",")
        for checkpointing in options.checkpointing.split(",")
    ]


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    os.environ.update(ENVIRONMENT)
    console = wide_console()
    table = options.out / f"{'tiny' if options.tiny else 'latest'}-pipeline.md"
    results = Results.read(table.with_suffix(".json"))
    cases = chosen(options)
    try:
        with tempfile.TemporaryDirectory(prefix="retrograde-pipeline-") as folder, ExitStack() as stack:
            contest = Contest(options.patience, Path(folder), stack) if cases else None
            for case in cases:
                work = Work(case, SMOKE if options.tiny else FULL)
                results.setting = _setting(work, work.parameters)
                results.cases[case] = contest.measure(work, 1 if options.tiny else options.rounds)
                console.print(_in_words(case, results.cases[case]), highlight=False)
                _write(results, table)
    except CrewError as error:
        console.print(f"FAILED {error}", markup=False, highlight=False)
        return 1
    if options.bubble:
        results.bubbles = bubble.measured()
        _write(results, table)
    for grid in grids(results):
        console.print(grid.rich())
    console.print(f"written: {table} and .json beside", highlight=False)
    return 0


def _write(results: Results, table: Path) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(markdown(results))
    table.with_suffix(".json").write_text(results.as_json() + "\n")


if __name__ == "__main__":
    sys.exit(main())
