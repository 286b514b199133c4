"""The cells of the matrix: which cases the test suite plays at which stage and world.

All models and forms of a row at stage 3 and world 2. At the other stages, and at worlds 1 and 4, it is the first of
each key, but for rows about ranks that diverge and for the plain row, which run with all models; at world 4 and stage
1, where gradients of more ranks wait for the step, only these. `python -m tests.patterns.table` plays everything
everywhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from tests.patterns.registry import Case
from tests.patterns.rows import CASES

LIMIT = 40.0  # seconds for one case, of which a good one takes a fraction of one


class Cell(NamedTuple):
    stage: int
    world: int
    case_id: str


def cells() -> Iterator[Cell]:
    played = {
        (2, 3): list(CASES),
        (2, 2): _few(),
        (2, 1): _few(),
        (1, 3): _few(),
        (4, 3): _few(),
        (4, 1): [case_id for case_id, case in CASES.items() if _diverges(case)],
    }
    for (world, stage), chosen in played.items():
        for case_id in chosen:
            yield Cell(stage, world, case_id)


def _few() -> list[str]:
    first = {case.key: case_id for case_id, case in reversed(CASES.items())}
    return [case_id for case_id, case in CASES.items() if case_id == first[case.key] or _diverges(case)]


def _diverges(case: Case) -> bool:
    return case.principal and (case.key == "1" or case.key.startswith("11"))


@functools.cache
def quick_cells() -> frozenset[Cell]:
    """The first model of every row, at stage 3 and world 2."""
    first = {(case.key, case.title): case_id for case_id, case in reversed(CASES.items())}
    return frozenset(Cell(3, 2, case_id) for case_id in first.values())
