"""`python -m tests.order --count 100000`: random programs, ranks that fail, rules left out, and all tiny programs."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from retrograde.transport.order import OrderPolicy
from tests.order.failures import how_caught, run_failing
from tests.order.mutants import MUTANTS
from tests.order.programs import TINY, features, guess, tiny
from tests.order.schedules import explore, measure, run_random
from tests.order.world import Setting, World

PROGRESS = 5000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--failing", type=int, default=None, help="random programs with a rank that fails; a tenth")
    parser.add_argument("--all", action="store_true", help="also the counts, every mutant and all tiny programs")
    given = parser.parse_args()
    failing = given.count // 10 if given.failing is None else given.failing
    failed = run("random programs", run_random, range(given.seed, given.seed + given.count))
    failed += run("programs with a rank that fails", run_failing, range(given.seed, given.seed + failing))
    if given.all:
        show_counts()
        failed += show_mutants()
        failed += show_tiny()
    return 1 if failed else 0


def run(what: str, program: Callable[[int], World], seeds: range) -> int:
    start = time.monotonic()
    stats: Counter[str] = Counter()
    failed = 0
    for seed in seeds:
        try:
            stats += program(seed).stats
        except AssertionError as error:
            failed += 1
            print(f"{what}: seed {seed}: {type(error).__name__}: {error}", flush=True)
        if (seed + 1) % PROGRESS == 0:
            print(f"{what}: {seed + 1 - seeds.start} so far, {failed} wrong", flush=True)
    seconds = time.monotonic() - start
    print(f"{len(seeds)} {what} from seed {seeds.start}: {failed} wrong, {seconds:.0f} s; {dict(stats)}", flush=True)
    return failed


def show_counts() -> None:
    """The table in docs/design/order.md."""
    print("| program | messages of each step | wants served one-sidedly | of at most |\n|---|---|---|---|")
    for name, feature in features().items():
        rows = measure(feature.programs, Setting(OrderPolicy(), guess=guess(range(6))))
        control = shortly([row.control for row in rows[:14]])
        one_sided = shortly([row.one_sided for row in rows[:14]])
        print(f"| {name} | {control} | {one_sided} | {max(row.wants for row in rows)} |", flush=True)


def shortly(values: Sequence[int]) -> str:
    """The last one is said once, however often it is repeated."""
    changes = [i for i, value in enumerate(values) if value != values[-1]]
    head = values[: changes[-1] + 1] if changes else []
    return ", ".join(map(str, head)) + (", then " if head else "") + str(values[-1])


def show_mutants() -> int:
    missed = 0
    for mutant in MUTANTS:
        found = how_caught(mutant)
        missed += not found
        print(f"without a rule: {mutant.name}: {found or 'NOT CAUGHT'}"[:160], flush=True)
    return missed


def show_tiny() -> int:
    """Returns how many were not explored to the end."""
    unfinished = 0
    for text in TINY:
        for runs_ahead in (False, True):
            found = explore(World(tiny(text), Setting(runs_ahead=runs_ahead)), 400_000)
            unfinished += not found.all
            print(f"all schedules of {text}{', running ahead' if runs_ahead else ''}: {found}", flush=True)
    return unfinished


if __name__ == "__main__":
    sys.exit(main())
