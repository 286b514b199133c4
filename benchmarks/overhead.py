"""`python -m benchmarks.overhead`: what sharding costs for each parameter, where parameters are small and many.

*Operations*: an optimizer's step, clipping, `zero_grad`, each by itself, as CPU time per parameter and call. It is that
of all threads of a rank: what an engine hands to a thread of its own has to be paid too, where there are as many ranks
as cores; waiting for another rank is not counted. *A whole step*: forward, backward, clip, step, `zero_grad`, as wall
time, since there waiting counts.

Each engine has its own ranks, which sleep while others are measured. In a round every operation is measured once on
every engine, in another order each time, and a ratio is one between measurements of the same round.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.progress import track

from benchmarks import meters
from benchmarks.crew import Crew
from benchmarks.overhead_rank import (
    ENGINES,
    PLAIN,
    SMOKE,
    WHOLE_STEP,
    Case,
    Measure,
    Measured,
    OverheadRank,
    SmallParameters,
)
from benchmarks.report import Grid, doubt, ranged
from benchmarks.rounds import Tables, options_of, publish, table_of
from benchmarks.run import machine, versions
from benchmarks.stats import Spread

_WORLD = 2
_PARAMETERS_PER_TURN = 2000  # so many are gone through in a turn, in two calls at least


@dataclass
class Costs:
    """What was measured. For each engine and case a value per round: CPU seconds, or a whole step's wall seconds."""

    setting: str
    seconds: dict[str, dict[Case, list[float]]] = field(default_factory=dict)
    main_thread: dict[str, dict[Case, list[float]]] = field(default_factory=dict)  # the same on the loop's own thread
    other_load: float = 0.0  # share of the machine used by others

    def over_plain(self, engine: str, case: Case) -> Spread:
        pairs = zip(self.seconds[engine][case], self.seconds[PLAIN][case], strict=True)
        return Spread.of([mine / plain for mine, plain in pairs])


class Rounds:
    """All engines' ranks alive at once, those of one awake."""

    def __init__(self, crews: dict[str, Crew], costs: Costs) -> None:
        self._crews = crews
        self._costs = costs
        self._cases: tuple[Case, ...] = crews[PLAIN].ready[0].cases
        self._cpu_so_far: dict[str, float] = {}  # of an engine's ranks
        for engine in crews:
            costs.seconds[engine] = {case: [] for case in self._cases}
            costs.main_thread[engine] = {case: [] for case in self._cases}

    def run(self, rounds: int, deadline: float, console: Console) -> None:
        """At least one, and none that begins after the deadline."""
        self._take(random.Random(0))
        busy = meters.machine_busy_seconds() - self._our_cpu_seconds()
        began = time.monotonic()
        for number in track(range(1, rounds), "rounds", console=console, transient=True):
            if time.monotonic() > deadline:
                console.print(f"stopped after {number} rounds: the time limit is reached", highlight=False)
                break
            self._take(random.Random(number))
        busy = meters.machine_busy_seconds() - self._our_cpu_seconds() - busy
        passed = (time.monotonic() - began) * (os.cpu_count() or 1)
        self._costs.other_load = max(0.0, busy / passed) if passed > 1 else 0.0

    def _take(self, draw: random.Random) -> None:
        for case in draw.sample(self._cases, len(self._cases)):
            for engine in draw.sample(list(self._crews), len(self._crews)):
                self._measure(engine, case)

    def _measure(self, engine: str, case: Case) -> None:
        calls = max(2, _PARAMETERS_PER_TURN // case.parameters)
        ranks: list[Measured] = self._crews[engine].ask(Measure(case, calls))
        self._cpu_so_far[engine] = sum(rank.cpu_so_far for rank in ranks)
        self._costs.seconds[engine][case].append(_seconds(case, ranks))
        self._costs.main_thread[engine][case].append(fmean(median(rank.main_thread) for rank in ranks))

    def _our_cpu_seconds(self) -> float:
        return time.process_time() + sum(self._cpu_so_far.values())


def _seconds(case: Case, ranks: list[Measured]) -> float:
    """Of a turn: the median call. A step ends when its last rank ends it; CPU time is a mean over ranks."""
    if case.operation == WHOLE_STEP:
        return median(max(step) for step in zip(*(rank.wall for rank in ranks), strict=True))
    return fmean(median(rank.cpu) for rank in ranks)


def measure(work: SmallParameters, rounds: int, patience: float, limit: float, console: Console) -> Costs:
    """`patience`: seconds a rank may take to answer; `limit`: seconds after which no round is begun."""
    deadline = time.monotonic() + limit
    costs = Costs(_setting(work))
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="retrograde-overhead-")))
        crews = {}
        for engine in ENGINES:
            console.print(f"starting {engine}", highlight=False)
            crew = Crew(engine, work, _WORLD, logs, patience, OverheadRank)
            crews[engine] = stack.enter_context(crew)
        Rounds(crews, costs).run(rounds, deadline, console)
    return costs


def _setting(work: SmallParameters) -> str:
    cpu = machine()
    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "deepspeed")
    return (
        f"Weights of {work.rows}×{work.width} and as many biases of {work.rows}, fp32, in units of ten parameters, "
        f"{_WORLD} ranks, {cpu['cores']} cores ({cpu['cpu']}), {installed}"
    )


# ---- results
def grids(costs: Costs) -> list[Grid]:
    cases = list(costs.seconds[PLAIN])
    operations = [case for case in cases if case.operation != WHOLE_STEP]
    steps = [case for case in cases if case.operation == WHOLE_STEP]
    return [_operations_grid(costs, operations), *(_step_grid(costs, case) for case in steps)]


def _operations_grid(costs: Costs, cases: list[Case]) -> Grid:
    sharded = [engine for engine in costs.seconds if engine != PLAIN]
    rows = []
    for case in sorted(cases, key=lambda case: case.parameters):
        micros = [f"{1e6 * median(taken[case]) / case.parameters:.2f}" for taken in costs.seconds.values()]
        ratios = [ranged(costs.over_plain(engine, case)) for engine in sharded]
        rows.append((case.operation, f"{case.parameters:,}", *micros, *ratios))
    columns = ("operation", "parameters", *(f"{engine}, µs" for engine in costs.seconds))
    over = tuple(f"{engine} ÷ {PLAIN}" for engine in sharded)
    return Grid("CPU time per parameter and call: median (lowest to highest round)", (*columns, *over), rows)


def _step_grid(costs: Costs, case: Case) -> Grid:
    rows: list[tuple[str, ...]] = []
    for engine, taken in costs.seconds.items():
        ratio = "1.00" if engine == PLAIN else ranged(costs.over_plain(engine, case))
        rows.append((engine, f"{1e3 * median(taken[case]):.1f}", ratio))
    title = f"Wall time of a whole step, {case.parameters:,} parameters: median (lowest to highest round)"
    return Grid(title, ("engine", "step, ms", f"× {PLAIN}"), rows)


def notes(costs: Costs) -> list[str]:
    rounds = min(len(taken) for taken in costs.seconds[PLAIN].values())
    return [
        f"{costs.setting}; {rounds} interleaved rounds.",
        f"Others used {costs.other_load:.0%} of the machine{doubt(costs.other_load)}.",
    ]


def as_json(costs: Costs) -> str:
    found = [
        {
            "engine": engine,
            **asdict(case),
            "seconds": taken,
            "main_thread_seconds": costs.main_thread[engine][case],
            "over_plain": asdict(costs.over_plain(engine, case)),
        }
        for engine, cases in costs.seconds.items()
        for case, taken in cases.items()
    ]
    return json.dumps({"setting": costs.setting, "other_load": round(costs.other_load, 4), "costs": found}, indent=1)


def tables(costs: Costs) -> Tables:
    return Tables(grids(costs), notes(costs), as_json(costs))


def main(argv: list[str] | None = None) -> int:
    parser = options_of("overhead", __doc__, rounds=15, patience=120.0)
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds after which no round is begun")
    options = parser.parse_args(argv)
    rounds = 2 if options.tiny else options.rounds
    work = SMOKE if options.tiny else SmallParameters()

    def run(console: Console) -> Tables:
        return tables(measure(work, rounds, options.patience, options.limit, console))

    return publish(run, table_of("overhead", options))


if __name__ == "__main__":
    sys.exit(main())
