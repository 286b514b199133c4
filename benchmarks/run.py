"""`python -m benchmarks.run`: time every contender in turns, on one machine, in one run."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import meters, report
from benchmarks.contenders import CONTENDERS, FIELDS
from benchmarks.crew import ENVIRONMENT, Crew, CrewError
from benchmarks.model import FULL, TINY
from benchmarks.protocol import Count, Turn, TurnTaken
from benchmarks.report import Results
from benchmarks.stats import LIMIT, Record, check_losses

RESULTS = Path(__file__).parent / "results"
_SHORTEST_TELLING = 1.0  # seconds; the kernel counts CPU time in hundredths
_ROOM_PER_RANK = 700 * 2**20  # interpreter, torch and activations
_BYTES_PER_PARAMETER = 20  # weight, gradient, two moments, and a bucket or a master copy


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--field", default="fp32", choices=list(FIELDS), help="who is compared with whom")
    parser.add_argument(
        "--contenders", help="some of the field, comma separated; of all fields: " + ", ".join(CONTENDERS)
    )
    parser.add_argument("--repeats", type=int, default=9, help="rounds in which everybody has a turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn")
    parser.add_argument("--settle", type=int, default=1, help="untimed steps before them")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--tiny", action="store_true", help="a very small model, two repeats: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds a turn may take")
    parser.add_argument("--limit", type=float, default=2700.0, help="seconds after which no repeat is begun")
    options = parser.parse_args(argv)
    options.names = [contender.name for contender in FIELDS[options.field]]
    if options.contenders is not None:
        asked = options.contenders.split(",")
        unknown = sorted(set(asked) - set(options.names))
        if unknown:
            parser.error(f"unknown contenders: {', '.join(unknown)}; there are {', '.join(options.names)}")
        options.names = [name for name in options.names if name.startswith(LIMIT) or name in asked]
        if len(options.names) == 1:
            parser.error(f"{options.contenders} is what others are compared with: name at least one of them")
    options.work = TINY if options.tiny else FULL
    if options.tiny:
        options.repeats = min(options.repeats, 2)
    return options


class Tournament:
    """All crews alive at once, one of them awake. A crew that fails leaves; the others go on, but not without the
    limit, which has a turn before each of theirs."""

    def __init__(self, options: argparse.Namespace, results: Results, console: Console) -> None:
        self._options = options
        self._results = results
        self._console = console
        self._limit = options.names[0]
        self._crews: dict[str, Crew] = {}
        self._records: dict[str, Record] = {}

    def run(self) -> None:
        began = time.monotonic()
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="retrograde-bench-")))
            for name in self._options.names:
                self._admit(name, logs, stack)
            with self._progress() as progress:
                work = progress.add_task("repeats", total=self._options.repeats * (len(self._crews) - 1))
                for repeat in range(self._options.repeats):
                    if time.monotonic() - began > self._options.limit:
                        self._say(f"stopped after {repeat} repeats: the time limit is reached")
                        break
                    for name in self._order(repeat):
                        progress.update(work, description=f"repeat {repeat + 1}: {name}")
                        self._records[self._limit].turns.append(self._turn(self._limit))
                        self._attempt(name, self._follow_limit)
                        progress.advance(work)
            for name in list(self._crews):
                self._attempt(name, self._count)
            self._results.records = {name: record for name, record in self._records.items() if record.counted}

    def _admit(self, name: str, logs: Path, stack: ExitStack) -> None:
        missing = CONTENDERS[name].missing() or self._no_room()
        if missing:
            self._results.absent[name] = missing
            self._say(f"skipped {name}: {missing}")
            return
        self._say(f"starting {name}")
        options = self._options
        try:
            crew = Crew(name, options.work, options.world, logs, options.patience)
        except CrewError as error:
            self._fail(name, error)
            return
        self._crews[name] = stack.enter_context(crew)
        self._records[name] = Record(name, crew.ready)

    def _no_room(self) -> str | None:
        known = [record.ready[0].parameters for record in self._records.values()]
        parameters = known[0] if known else 0
        needed = self._options.world * (_ROOM_PER_RANK + _BYTES_PER_PARAMETER * parameters)
        free = meters.available_bytes()
        if free >= needed:
            return None
        return f"{free / 2**30:.1f} GiB of memory are free and {needed / 2**30:.1f} needed"

    def _order(self, repeat: int) -> list[str]:
        names = [name for name in self._crews if name != self._limit]
        random.Random(repeat).shuffle(names)
        return names

    def _follow_limit(self, name: str) -> None:
        self._records[name].follow(self._records[self._limit], self._turn(name))

    def _turn(self, name: str) -> list[TurnTaken]:
        busy_before = meters.machine_busy_seconds()
        began = time.perf_counter()
        taken: list[TurnTaken] = self._crews[name].ask(Turn(self._options.steps, self._options.settle))
        busy = meters.machine_busy_seconds() - busy_before
        wall = time.perf_counter() - began
        others = busy - sum(rank.cpu_seconds for rank in taken)
        if wall > _SHORTEST_TELLING:
            self._results.other_load.append(max(0.0, others / (wall * (os.cpu_count() or 1))))
        return taken

    def _count(self, name: str) -> None:
        """The last thing a crew does: the profiler takes memory, which must not count as the engine's."""
        self._records[name].counted = self._crews[name].ask(Count())
        self._crews.pop(name).close()

    def _attempt(self, name: str, action: Callable[[str], None]) -> None:
        try:
            action(name)
        except CrewError as error:
            self._fail(name, error)

    def _fail(self, name: str, error: CrewError) -> None:
        self._results.failed[name] = str(error)
        self._say(f"FAILED {error}")
        self._records.pop(name, None)
        crew = self._crews.pop(name, None)
        if crew is not None:
            crew.kill()

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu = names[0] if names else "unknown CPU"
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1)}


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "retrograde", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    os.environ.update(ENVIRONMENT)
    console = report.wide_console()
    now = datetime.now(UTC)
    results = Results(
        date=now.isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(),
        work=options.work,
        world=options.world,
        steps=options.steps,
    )
    Tournament(options, results, console).run()
    if not results.records:
        console.print("nothing was measured")
        return 1
    report.show(results, console)
    stem = f"{'tiny-' if options.tiny else ''}{now:%Y%m%d-%H%M%S}"
    saved = [report.save(results, options.out, stem)]
    # What docs/benchmarks.md and the README show is a complete run; a failed or partial one must not replace it.
    if not options.tiny and options.contenders is None and not results.failed:
        saved.append(report.save(results, options.out, f"latest-{options.field}"))
    console.print(f"written: {', '.join(str(path) for path in saved)} and .json beside", highlight=False)
    losses = check_losses(results.records)
    return 1 if results.failed or (losses and losses.wrong()) else 0


if __name__ == "__main__":
    sys.exit(main())
