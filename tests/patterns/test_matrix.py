"""The free-form backward matrix: every row, stages 1, 2, 3, worlds 1, 2, 4, bit for bit plain torch.

All models and forms of a row run at world 2, at stages 1 and 3, which differ in everything that a stage is. Elsewhere
it is the first of them, but for rows about ranks that diverge and for the plain row, which run with all models.
`python -m tests.patterns.table` runs everything everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.harness import Ranks
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import Trace, differences

LIMIT = 40.0  # seconds for one case, of which a good one takes a fraction of one
STAGES = (1, 2, 3)
WORLDS = (1, 2, 4)


def cells() -> Iterator[tuple[int, int, str]]:
    first = {case.key: case_id for case_id, case in reversed(CASES.items())}
    few = [
        case_id
        for case_id, case in CASES.items()
        if case_id == first[case.key] or (case.principal and (case.key == "1" or case.key.startswith("11")))
    ]
    for world, stage in itertools.product(WORLDS, STAGES):
        for case_id in CASES if world == 2 and stage != 2 else few:
            yield stage, world, case_id


@pytest.mark.parametrize(("stage", "world", "case_id"), list(cells()))
def test_matrix(case_id: str, world: int, stage: int, ranks: Ranks) -> None:
    def reference() -> list[Trace]:
        return expected(case_id, world, stage)

    got = ranks(world).run(play_rank, case_id, stage, timeout=LIMIT, beside=reference)
    want = reference()  # kept
    for rank in range(world):
        found = differences(got[rank], want[rank], CASES[case_id].rtol)
        assert not found, f"rank {rank}: " + "\n".join(found[:12])
