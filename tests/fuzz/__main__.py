"""`python -m tests.fuzz --count 1000 --seed 0`: run cases; a failure ends as a short program that shows it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator

from tests.harness import WORKER_ENVIRONMENT, Pools

# Before torch: what is computed here must use the kernels that the ranks use.
os.environ.update(WORKER_ENVIRONMENT)

import torch

from tests.fuzz.check import Checker
from tests.fuzz.generate import recipe
from tests.fuzz.recipes import Recipe
from tests.fuzz.shrink import shrink

BATCH = 20
SCRIPT = """
from tests.fuzz.check import Checker
from tests.fuzz.recipes import Act, Phase, Recipe, Touch
from tests.harness import Pools

if __name__ == "__main__":
    ranks = Pools()
    print(*Checker(ranks).check({recipe!r}, delay={delay}), sep="\\n")
    ranks.close()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--delays", type=int, default=None, help="a seed for messages and ranks that are late")
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start, failed = time.monotonic(), 0
    with contextlib.closing(Pools()) as ranks:
        checker = Checker(ranks)
        for batch in batches(given.seed, given.count):
            for case, wrong in zip(batch, checker.check_all(batch, given.delays), strict=True):
                if wrong:
                    failed += 1
                    report(case, wrong, checker, given.delays, given.no_shrink)
    seconds = time.monotonic() - start
    print(f"{given.count} programs from seed {given.seed}, delays {given.delays}: {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


def batches(seed: int, count: int) -> Iterator[list[Recipe]]:
    """Cases of one world each, so that ranks play several in one call."""
    cases = sorted(map(recipe, range(seed, seed + count)), key=lambda case: case.world)
    for _, alike in itertools.groupby(cases, key=lambda case: case.world):
        of_world = list(alike)
        for first in range(0, len(of_world), BATCH):
            yield of_world[first : first + BATCH]


def report(case: Recipe, wrong: list[str], checker: Checker, delay: int | None, plain: bool) -> None:
    print(f"\n==== seed {case.seed} fails:", *wrong[:6], sep="\n")
    sys.stdout.flush()
    if plain:
        return
    smallest = shrink(case, lambda each: bool(checker.check(each, delay)))
    print("\n---- the smallest program that fails; run it from the project's folder:\n")
    print(SCRIPT.format(recipe=smallest, delay=delay))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
