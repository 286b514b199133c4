"""Runs the matrix, with all models at all worlds, and prints it: `python -m tests.patterns.table [filter ...]`.

`--transport collective` goes by collectives; `--worlds 2 --stages 3` plays less."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys

from tests.harness import WORKER_ENVIRONMENT, Pools, RankError, RankPool, RankTimeout

if __name__ == "__main__":
    # Before torch: the plain references computed here must use the kernels that the ranks use.
    os.environ.update(WORKER_ENVIRONMENT)

from collections import Counter
from collections.abc import Sequence

import torch

from tests.patterns.cells import LIMIT
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.stages import STAGES, WORLDS

EXACT, WRONG, RAISED, HUNG = "=", "SW", "R", "H"
Row = tuple[str, str]


def verdict(pool: RankPool, case_id: str, stage: int, transport: str) -> tuple[str, str]:
    """How a case went, and why."""
    want = expected(case_id, pool.world, stage)
    try:
        got = pool.run(play_rank, case_id, stage, timeout=LIMIT, transport=transport)
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


def run(case_ids: list[str], asked: argparse.Namespace) -> dict[tuple[Row, int], dict[str, list[int]]]:
    """For each row and stage: the worlds with each verdict, over all models of the row."""
    cells: dict[tuple[Row, int], dict[str, list[int]]] = {}
    for world in asked.worlds:
        with contextlib.closing(Pools()) as ranks:
            for stage, case_id in itertools.product(asked.stages, case_ids):
                mark, why = verdict(ranks(world), case_id, stage, asked.transport)
                case = CASES[case_id]
                cells.setdefault(((case.key, case.title), stage), {}).setdefault(mark, []).append(world)
                if why:
                    print(f"{case_id}, stage {stage}, world {world}: {mark}\n{why}", file=sys.stderr)
    return cells


def show(verdicts: dict[str, list[int]]) -> str:
    wrong = {mark: sorted(set(worlds)) for mark, worlds in verdicts.items() if mark != EXACT}
    return ", ".join(f"{mark} ({', '.join(map(str, worlds))})" for mark, worlds in wrong.items()) or EXACT


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="auto", choices=("auto", "collective", "one-sided"))
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("filters", nargs="*", help="parts of names of cases; all by default")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    case_ids = [name for name in CASES if not asked.filters or any(text in name for text in asked.filters)]
    cells = run(case_ids, asked)
    heads = [f"stage {stage}" for stage in asked.stages]
    print("| # | pattern | " + " | ".join(heads) + " |\n|---|---|" + "---|" * len(heads))
    for row in dict.fromkeys(row for row, _ in cells):
        print(f"| {row[0]} | {row[1]} | " + " | ".join(show(cells[row, stage]) for stage in asked.stages) + " |")
    totals = Counter(dict.fromkeys((EXACT, WRONG, RAISED, HUNG), 0))
    for verdicts in cells.values():
        totals.update({mark: len(worlds) for mark, worlds in verdicts.items()})
    rows = len({row for row, _ in cells})
    print(
        f"\n{rows} patterns, {len(case_ids)} cases with their models, at stages {_listed(asked.stages)} and worlds "
        f"{_listed(asked.worlds)}: "
        f"{totals[EXACT]} of {totals.total()} exact (`=`), {totals[WRONG]} silently wrong (`SW`), "
        f"{totals[RAISED]} raised (`R`), {totals[HUNG]} hung (`H`); the worlds are in brackets."
    )
    return 0 if totals[EXACT] == totals.total() else 1


if __name__ == "__main__":
    sys.exit(main())
