"""The free-form backward matrix: every row, stages 1, 2, 3, worlds 1, 2, 4, bit for bit plain torch.

At world 4 every row runs with its principal model; `python -m tests.patterns.table` runs all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.harness import RankPool
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences

LIMIT = 40.0  # seconds for one case, of which a good one takes a fraction of one
STAGES = (1, 2, 3)
WORLDS = (1, 2, 4)


def cells() -> Iterator[tuple[int, int, str]]:
    for world, stage in itertools.product(WORLDS, STAGES):
        for case_id, case in CASES.items():
            if case.principal or world < max(WORLDS):
                yield stage, world, case_id


@pytest.mark.parametrize(("stage", "world", "case_id"), list(cells()))
def test_matrix(case_id: str, world: int, stage: int, ranks: Callable[[int], RankPool]) -> None:
    want = expected(case_id, world, stage)
    got = ranks(world).run(play_rank, case_id, stage, timeout=LIMIT)
    for rank in range(world):
        found = differences(got[rank], want[rank], CASES[case_id].rtol)
        assert not found, f"rank {rank}: " + "\n".join(found[:12])
