"""Plays the backward matrix on the test device: `python -m tests.accelerator.table [--world 2] [--mode lazy] ...`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys

from tests.harness import WORKER_ENVIRONMENT, Pools, RankError, RankPool, RankTimeout

if __name__ == "__main__":
    os.environ.update(WORKER_ENVIRONMENT)  # before torch, as tests/patterns/table.py does

import torch

from tests.accelerator import build, device
from tests.accelerator.matrix import play_late
from tests.accelerator.ranks import LateSeat
from tests.accelerator.refused import is_refused
from tests.patterns.backend_sums import differences_of_sums
from tests.patterns.cells import LIMIT
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.stages import STAGES


def faults(pool: RankPool, case_id: str, stage: int, mode: str, seed: int, **options: object) -> list[str]:
    """What is wrong with a case: nothing, differences, or the end of what its ranks raised."""
    want = expected(case_id, pool.world, stage)
    try:
        got = pool.run(play_late, case_id, stage, mode, seed, timeout=LIMIT, **options)
    except (RankError, RankTimeout) as error:
        return [str(error)[-600:]]
    each = zip(got, want, strict=True)
    how = (CASES[case_id], pool.world, bool(options["exact"]))
    return [text for mine, theirs in each for text in differences_of_sums(*how, mine, theirs)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--mode", default="lazy", choices=sorted({mode for mode, _ in device.MODES}))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="collective", choices=("collective", "one-sided"))
    parser.add_argument("--sums", default="exact", choices=("exact", "backend"), help="in rank order, or the backend's")
    parser.add_argument("--offload", choices=("optimizer", "parameters"))
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="every how-manieth case, from which on")
    parser.add_argument("rows", nargs="*", help="parts of names of cases; all by default")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    build.build()
    chosen = [case_id for case_id in CASES if not asked.rows or any(row in case_id for row in asked.rows)]
    chosen = chosen[asked.part[0] :: asked.part[1]]
    options = {"transport": asked.transport, "exact": asked.sums == "exact"}
    if asked.offload is not None:
        options["offload"] = asked.offload
    exact = 0
    refused = 0
    with contextlib.closing(Pools(LateSeat)) as ranks:
        for stage, case_id in itertools.product(asked.stages, chosen):
            found = faults(ranks(asked.world), case_id, stage, asked.mode, asked.seed, **options)
            if asked.offload is not None and is_refused(CASES[case_id].key, found):
                refused += 1
                continue
            exact += not found
            if found:
                print(f"{case_id}, stage {stage}: " + "\n".join(found[:4]), flush=True)
    total = len(chosen) * len(asked.stages)
    right = "exact" if options["exact"] else "right up to rounding (tests/patterns/backend_sums.py)"
    print(f"world {asked.world}, {asked.mode}, seed {asked.seed}: {exact} of {total} {right}, without a race")
    if refused:
        print(f"{refused} are refused: tensors of two devices (tests/accelerator/refused.py)")
    return 0 if exact + refused == total else 1


if __name__ == "__main__":
    sys.exit(main())
