"""`python -m benchmarks.window`: several backwards a step, reduced each time or once.

An MLP in bf16 on two ranks, with 2, 4 and 8 backwards a step at stages 1, 2 and 3: what waits in the window, what
remains after it, what goes over the wire, and the step's time beside that of the same step without a window. In a
round every case is timed once on every engine, in another order each time, and ratios are between steps of one round.
DeepSpeed takes part if it is installed, a stage at a time: each of its ranks holds a bucket of a gigabyte.

It takes half an hour. `--engines retrograde-1`, then `--engines retrograde-2 --add` and so on measure a part each, and
give the same tables: ratios are between steps of one engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from benchmarks import meters
from benchmarks.crew import Crew, CrewError
from benchmarks.report import Grid, doubt, ranged
from benchmarks.rounds import Tables, options_of, publish, table_of
from benchmarks.run import machine, versions
from benchmarks.stats import Spread
from benchmarks.window_rank import SMOKE, Case, Look, Manner, Mlp, Seen, Time, Timed, WindowRank

_WORLD = 2
_BACKWARDS = (2, 4, 8)
_MIB = 2**20
_RETROGRADE = ("retrograde-1", "retrograde-2", "retrograde-3")
# Engines that are alive together, and take turns.
_GROUPS = (_RETROGRADE, ("deepspeed-1",), ("deepspeed-2",), ("deepspeed-3",))
_OF_SEEN = [field.name for field in fields(Seen)]


@dataclass
class Windows:
    """What was measured, by engine and case: a time for each round, and what rank 0 saw."""

    setting: str
    work: Mlp
    seconds: dict[str, dict[Case, list[float]]] = field(default_factory=dict)
    seen: dict[str, dict[Case, Seen]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    other_load: dict[str, list[float]] = field(default_factory=dict)  # per step, share of the machine used by others

    def over_each(self, engine: str, case: Case) -> Spread:
        """The step's time, as a share of that of the same step without a window."""
        apart = self.seconds[engine][Case(Manner.EACH, case.backwards)]
        return Spread.of([mine / other for mine, other in zip(self.seconds[engine][case], apart, strict=True)])

    @property
    def load(self) -> float:
        return median(load for loads in self.other_load.values() for load in loads)

    def add(self, earlier: Path) -> None:
        """What an earlier run has found with other engines."""
        stored = json.loads(earlier.read_text())
        if stored["setting"] != self.setting:
            raise CrewError(f"{earlier} is of another setting: {stored['setting']}")
        measured = [*self.seen, *self.absent]
        self.absent += [engine for engine in stored["absent"] if engine not in measured]
        for found in stored["cases"]:
            engine = found["engine"]
            if engine not in measured:
                case = Case(Manner(found["manner"]), found["backwards"])
                self.seen.setdefault(engine, {})[case] = Seen(**{name: found[name] for name in _OF_SEEN})
                self.seconds.setdefault(engine, {})[case] = found["seconds"]
                self.other_load[engine] = stored["other_load"][engine]


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
            taken, others = _timed(crews[engine], case)
            seconds[engine].setdefault(case, []).append(taken)
            windows.other_load.setdefault(engine, []).append(others)
    windows.seen |= seen
    windows.seconds |= seconds


def _timed(crew: Crew, case: Case) -> tuple[float, float]:
    """Seconds of a step, which ends when its last rank ends it, and the share of the machine that others used."""
    busy, began = meters.machine_busy_seconds(), time.monotonic()
    ranks: list[Timed] = crew.ask(Time(case))
    others = meters.machine_busy_seconds() - busy - sum(rank.cpu_seconds for rank in ranks)
    share = others / (time.monotonic() - began) / (os.cpu_count() or 1)
    return max(rank.seconds for rank in ranks), max(0.0, share)


def _setting(work: Mlp) -> str:
    cpu = machine()
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"MLP of {work.layers} layers of {work.width}×{work.width} in bf16 ({work.gradient_bytes // 2:,} parameters), "
        f"{work.rows} rows a batch, SGD, {_WORLD} ranks, {cpu['cores']} cores ({cpu['cpu']}), {installed}"
    )


# ---- results
def grids(windows: Windows) -> list[Grid]:
    return [_grid(windows, engine) for group in _GROUPS for engine in group if engine in windows.seen]


def _grid(windows: Windows, engine: str) -> Grid:
    rows = []
    for case in sorted(windows.seen[engine], key=lambda case: (case.backwards, list(Manner).index(case.manner))):
        seen = windows.seen[engine][case]
        taken = median(windows.seconds[engine][case])
        ratio = windows.over_each(engine, case)
        spread = "1.00" if case.manner is Manner.EACH else ranged(ratio)
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
    said.append(f"Others used {windows.load:.0%} of the machine in a median step{doubt(windows.load)}.")
    return said + [f"Not installed, or failed: {', '.join(windows.absent)}."] * bool(windows.absent)


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
    load = {engine: [round(each, 4) for each in loads] for engine, loads in windows.other_load.items()}
    return json.dumps(
        {"setting": windows.setting, "absent": windows.absent, "other_load": load, "cases": found}, indent=1
    )


def tables(windows: Windows) -> Tables:
    return Tables(grids(windows), notes(windows), as_json(windows))


def main(argv: list[str] | None = None) -> int:
    parser = options_of("window", __doc__, rounds=3, patience=180.0)
    parser.add_argument("--engines", default="", help="some of them, with commas between; all if it is empty")
    parser.add_argument("--add", action="store_true", help="to what earlier runs have found with other engines")
    options = parser.parse_args(argv)
    rounds = 1 if options.tiny else options.rounds
    work = SMOKE if options.tiny else Mlp()
    table = table_of("window", options)

    def run(console: Console) -> Tables:
        if meters.available_bytes() < 24 * work.gradient_bytes:
            raise CrewError(f"this takes {24 * work.gradient_bytes / _MIB:.0f} MiB of memory")
        windows = measure(work, _chosen(options.engines), rounds, options.patience, console)
        if options.add:
            windows.add(table.with_suffix(".json"))
        return tables(windows)

    return publish(run, table)


if __name__ == "__main__":
    sys.exit(main())
