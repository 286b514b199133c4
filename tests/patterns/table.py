"""Runs the matrix, with all models at all worlds, and prints it: `python -m tests.patterns.table [filter ...]`."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys

from tests.harness import WORKER_ENVIRONMENT, Pools, RankError, RankPool, RankTimeout

if __name__ == "__main__":
    # Before torch: the plain references computed here must use the kernels that the ranks use.
    os.environ.update(WORKER_ENVIRONMENT)

from collections import Counter

import torch

from tests.patterns.cells import LIMIT
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.stages import STAGES, WORLDS

EXACT, WRONG, RAISED, HUNG = "=", "SW", "R", "H"
Row = tuple[str, str]


def verdict(pool: RankPool, case_id: str, stage: int) -> tuple[str, str]:
    """How a case went, and why."""
    want = expected(case_id, pool.world, stage)
    try:
        got = pool.run(play_rank, case_id, stage, timeout=LIMIT)
    except RankTimeout as error:
        return HUNG, str(error)
    except RankError as error:
        return RAISED, str(error)
    found = [
        f"rank {rank}: {text}"
        for rank in range(pool.world)
        for text in differences(got[rank], want[rank], CASES[case_id].rtol)
    ]
    return (WRONG, "\n".join(found[:4])) if found else (EXACT, "")


def run(case_ids: list[str]) -> dict[tuple[Row, int], dict[str, list[int]]]:
    """For each row and stage: the worlds with each verdict, over all models of the row."""
    cells: dict[tuple[Row, int], dict[str, list[int]]] = {}
    for world in WORLDS:
        with contextlib.closing(Pools()) as ranks:
            for stage, case_id in itertools.product(STAGES, case_ids):
                mark, why = verdict(ranks(world), case_id, stage)
                case = CASES[case_id]
                cells.setdefault(((case.key, case.title), stage), {}).setdefault(mark, []).append(world)
                if why:
                    print(f"{case_id}, stage {stage}, world {world}: {mark}\n{why}", file=sys.stderr)
    return cells


def show(verdicts: dict[str, list[int]]) -> str:
    wrong = {mark: sorted(set(worlds)) for mark, worlds in verdicts.items() if mark != EXACT}
    return ", ".join(f"{mark} ({', '.join(map(str, worlds))})" for mark, worlds in wrong.items()) or EXACT


def main() -> int:
    torch.set_num_threads(1)
    filters = sys.argv[1:]
    case_ids = [name for name in CASES if not filters or any(text in name for text in filters)]
    cells = run(case_ids)
    print("| # | pattern | stage 1 | stage 2 | stage 3 |\n|---|---|---|---|---|")
    for row in dict.fromkeys(row for row, _ in cells):
        print(f"| {row[0]} | {row[1]} | " + " | ".join(show(cells[row, stage]) for stage in STAGES) + " |")
    totals = Counter(dict.fromkeys((EXACT, WRONG, RAISED, HUNG), 0))
    for verdicts in cells.values():
        totals.update({mark: len(worlds) for mark, worlds in verdicts.items()})
    rows = len({row for row, _ in cells})
    print(
        f"\n{rows} patterns, {len(case_ids)} cases with their models, at stages 1, 2, 3 and worlds 1, 2, 4: "
        f"{totals[EXACT]} of {totals.total()} exact (`=`), {totals[WRONG]} silently wrong (`SW`), "
        f"{totals[RAISED]} raised (`R`), {totals[HUNG]} hung (`H`); the worlds are in brackets."
    )
    return 0 if totals[EXACT] == totals.total() else 1


if __name__ == "__main__":
    sys.exit(main())
