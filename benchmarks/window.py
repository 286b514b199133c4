"""`python -m benchmarks.window`: several backwards a step, reduced each time or once.

An MLP in bf16 on two ranks, with 2, 4 and 8 backwards a step at stages 1, 2 and 3: what waits in the window, what
remains after it, what goes over the wire, and the step's time beside that of the same step without a window. In a
round every case is timed once on every engine, in another order each time, and ratios are between steps of one round.
DeepSpeed takes part if it is installed, a stage at a time: each of its ranks holds a bucket of a gigabyte.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from benchmarks import meters
from benchmarks.crew import ENVIRONMENT, Crew, CrewError
from benchmarks.report import Grid, doubt, wide_console
from benchmarks.run import RESULTS, machine, versions
from benchmarks.stats import Spread
from benchmarks.window_rank import SMOKE, Case, Look, Manner, Mlp, Seen, Time, Timed, WindowRank

_WORLD = 2
_BACKWARDS = (2, 4, 8)
_MIB = 2**20
_RETROGRADE = ("retrograde-1", "retrograde-2", "retrograde-3")
# Engines that are alive together, and take turns.
_GROUPS = (_RETROGRADE, ("deepspeed-1",), ("deepspeed-2",), ("deepspeed-3",))


@dataclass
class Windows:
    """What was measured, by engine and case: a time for each round, and what rank 0 saw."""

    setting: str
    work: Mlp
    seconds: dict[str, dict[Case, list[float]]] = field(default_factory=dict)
    seen: dict[str, dict[Case, Seen]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    other_load: list[float] = field(default_factory=list)  # per step, share of the machine used by others

    def over_each(self, engine: str, case: Case) -> Spread:
        """The step's time, as a share of that of the same step without a window."""
        apart = self.seconds[engine][Case(Manner.EACH, case.backwards)]
        return Spread.of([mine / other for mine, other in zip(self.seconds[engine][case], apart, strict=True)])


def measure(work: Mlp, groups: Sequence[Sequence[str]], rounds: int, patience: float, console: Console) -> Windows:
    windows = Windows(_setting(work), work)
    with tempfile.TemporaryDirectory(prefix="retrograde-window-") as folder:
        for group in groups:
            if importlib.util.find_spec(group[0].partition("-")[0]) is None:
                windows.absent += group
                continue
            console.print(f"starting {', '.join(group)}", highlight=False)
            try:
                with ExitStack() as stack:
                    crews = {
                        engine: stack.enter_context(Crew(engine, work, _WORLD, Path(folder), patience, WindowRank))
                        for engine in group
                    }
                    _take_turns(crews, rounds, windows, console)
            except CrewError as error:
                if set(group) <= set(_RETROGRADE):
                    raise
                console.print(f"FAILED {error}", markup=False, highlight=False)
                windows.absent += group
    return windows


def _chosen(engines: str) -> list[list[str]]:
    """The groups, with those of their engines that were asked for."""
    wanted = engines.split(",") if engines else [engine for group in _GROUPS for engine in group]
    found = [[engine for engine in group if engine in wanted] for group in _GROUPS]
    return [group for group in found if group]


def _take_turns(crews: dict[str, Crew], rounds: int, windows: Windows, console: Console) -> None:
    cases = [
        (engine, Case(manner, backwards))
        for engine, crew in crews.items()
        for manner in crew.ready[0].manners
        for backwards in _BACKWARDS
    ]
    seen: dict[str, dict[Case, Seen]] = {engine: {} for engine in crews}
    seconds: dict[str, dict[Case, list[float]]] = {engine: {} for engine in crews}
    for engine, case in cases:  # a first time, which is not timed
        seen[engine][case] = crews[engine].ask(Look(case))[0]
    for number in track(range(rounds), "rounds", console=console, transient=True):
        for engine, case in random.Random(number).sample(cases, len(cases)):
            seconds[engine].setdefault(case, []).append(_timed(crews[engine], case, windows))
    windows.seen |= seen
    windows.seconds |= seconds


def _timed(crew: Crew, case: Case, windows: Windows) -> float:
    """A step ends when its last rank ends it."""
    busy, began = meters.machine_busy_seconds(), time.monotonic()
    ranks: list[Timed] = crew.ask(Time(case))
    others = meters.machine_busy_seconds() - busy - sum(rank.cpu_seconds for rank in ranks)
    windows.other_load.append(max(0.0, others / (time.monotonic() - began) / (os.cpu_count() or 1)))
    return max(rank.seconds for rank in ranks)


def _setting(work: Mlp) -> str:
    cpu = machine()
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"MLP of {work.layers} layers of {work.width}×{work.width} in bf16 ({work.gradient_bytes // 2:,} parameters), "
        f"{work.rows} rows a batch, SGD, {_WORLD} ranks, {cpu['cores']} cores ({cpu['cpu']}), {installed}"
    )


# ---- results
def grids(windows: Windows) -> list[Grid]:
    return [_grid(windows, engine) for engine in windows.seen]


def _grid(windows: Windows, engine: str) -> Grid:
    rows = []
    for case in sorted(windows.seen[engine], key=lambda case: (case.backwards, list(Manner).index(case.manner))):
        seen = windows.seen[engine][case]
        taken = median(windows.seconds[engine][case])
        ratio = windows.over_each(engine, case)
        spread = "1.00" if case.manner is Manner.EACH else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        memory = [f"{each / _MIB:.0f}" for each in (seen.waiting, seen.peak, seen.after)]
        counts = (str(case.backwards), str(case.manner), _communication(seen), f"{seen.sent / _MIB:.0f}")
        rows.append((*counts, *memory, f"{taken:.2f}", spread))
    columns = ("backwards", "reduced", "communication", "sent, MiB", "waiting, MiB", "peak, MiB", "after, MiB")
    return Grid(engine, (*columns, "step, s", "× each"), rows)


def _communication(seen: Seen) -> str:
    counts = {kind: count for kind, count in seen.exchanges.items() if kind != "agree"} or seen.calls
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind != "barrier")


def notes(windows: Windows) -> list[str]:
    whole = windows.work.gradient_bytes / _MIB
    rounds = min(len(taken) for cases in windows.seconds.values() for taken in cases.values())
    said = [
        f"{windows.setting}; {rounds} rounds, medians (lowest to highest).",
        f"By arithmetic one gradient of {whole:.0f} MiB waits in a window, {whole / 2:.0f} MiB with a budget of half, "
        f"and {whole / _WORLD:.0f} MiB of it remain. Memory is what is resident on rank 0 beyond what was there before "
        f"the step.",
    ]
    load = median(windows.other_load)
    said.append(f"Others used {load:.0%} of the machine in a median step{doubt(load)}.")
    return said + [f"Not installed, or failed: {', '.join(windows.absent)}."] * bool(windows.absent)


def markdown(windows: Windows) -> str:
    parts = [grid.markdown() for grid in grids(windows)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(windows))]) + "\n"


def as_json(windows: Windows) -> str:
    found = [
        {
            "engine": engine,
            **asdict(case),
            **asdict(seen),
            "seconds": windows.seconds[engine][case],
            "over_each": asdict(windows.over_each(engine, case)),
        }
        for engine, cases in windows.seen.items()
        for case, seen in cases.items()
    ]
    load = round(median(windows.other_load), 4)
    return json.dumps(
        {"setting": windows.setting, "absent": windows.absent, "other_load": load, "cases": found}, indent=1
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every case is timed once")
    parser.add_argument("--engines", default="", help="some of them, with commas between; all if it is empty")
    parser.add_argument("--tiny", action="store_true", help="a small model, one round: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds a rank may take to answer")
    options = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    console = wide_console()
    work = SMOKE if options.tiny else Mlp()
    if meters.available_bytes() < 24 * work.gradient_bytes:
        console.print(f"this takes {24 * work.gradient_bytes / _MIB:.0f} MiB of memory", highlight=False)
        return 1
    try:
        rounds = 1 if options.tiny else options.rounds
        windows = measure(work, _chosen(options.engines), rounds, options.patience, console)
    except CrewError as error:
        console.print(f"FAILED {error}", markup=False, highlight=False)
        return 1
    for grid in grids(windows):
        console.print(grid.rich())
    for note in notes(windows):
        console.print(note, markup=False, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / f"{'tiny' if options.tiny else 'latest'}-window.md"
    table.write_text(markdown(windows))
    table.with_suffix(".json").write_text(as_json(windows) + "\n")
    console.print(f"written: {table} and .json beside", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
