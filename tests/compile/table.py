"""Plays the matrix with compiled models: `python -m tests.compile.table [stage [world [filter [backend]]]]`.

Both sides are compiled, the whole model and unit by unit, with aot_eager if no other backend is given. `e`: equal to
plain torch without compiling, and not with it. Not part of the test suite: a few hundred compilations take a while."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys

from tests.harness import WORKER_ENVIRONMENT, Pools, RankError, RankPool, RankTimeout

if __name__ == "__main__":
    # Before torch: the plain references computed here must use the kernels that the ranks use.
    os.environ.update(WORKER_ENVIRONMENT)

from collections import Counter

import torch

from tests.compile.driver import Compiled, How, compare
from tests.compile.models import COMPILE_CASES
from tests.patterns.rows import CASES

LIMIT = 100.0


def verdict(pool: RankPool, case: str, stage: int, compiled: Compiled) -> str:
    try:
        found = compare(pool, case, stage, compiled, LIMIT)
    except RankError as error:
        return "R " + str(error).strip().splitlines()[-1]
    except RankTimeout:
        return "H"
    if found and not compare(pool, case, stage, compiled, LIMIT, to_eager=True):
        return "e"
    return "SW " + found[0] if found else "="


def main(stage: int = 3, world: int = 2, wanted: str = "", backend: str = "aot_eager") -> None:
    torch.set_num_threads(1)
    counts = Counter[str]()
    cases = [case for case in COMPILE_CASES | CASES if re.search(wanted, case)]
    with contextlib.closing(Pools()) as ranks:
        for case, how in itertools.product(cases, How):
            result = verdict(ranks(world), case, stage, Compiled(how, backend))
            counts[result.split(" ")[0]] += 1
            print(f"{case:45} {how.value:6} {result}", flush=True)
    print(f"stage {stage}, world {world}, {backend}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*(int(number) for number in given[:2]), *given[2:4])
