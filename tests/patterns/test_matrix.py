"""The free-form backward matrix: every row, bit for bit plain torch, at the stages and worlds of cells.py."""

from __future__ import annotations

import pytest

from tests.harness import Ranks
from tests.patterns.cells import LIMIT, Cell, cells
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import Trace, differences


@pytest.mark.parametrize(Cell._fields, list(cells()))
def test_matrix(case_id: str, world: int, stage: int, ranks: Ranks) -> None:
    def reference() -> list[Trace]:
        return expected(case_id, world, stage)

    got = ranks(world).run(play_rank, case_id, stage, timeout=LIMIT, beside=reference)
    want = reference()  # kept
    for rank in range(world):
        found = differences(got[rank], want[rank], CASES[case_id].rtol)
        assert not found, f"rank {rank}: " + "\n".join(found[:12])
