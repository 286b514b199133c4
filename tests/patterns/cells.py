"""The cells of the matrix: which cases the test suite plays at which stage and world.

All models and forms of a row at world 2, at stages 1 and 3, which differ in everything that a stage is. Elsewhere it is
the first of each key, but for rows about ranks that diverge and for the plain row, which run with all models.
`python -m tests.patterns.table` plays everything everywhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.patterns.rows import CASES
from tests.stages import STAGES, WORLDS

LIMIT = 40.0  # seconds for one case, of which a good one takes a fraction of one


class Cell(NamedTuple):
    stage: int
    world: int
    case_id: str


def cells() -> Iterator[Cell]:
    for world, stage in itertools.product(WORLDS, STAGES):
        everything = world == 2 and stage != 2
        for case_id in CASES if everything else _few():
            yield Cell(stage, world, case_id)


def _few() -> list[str]:
    first = {case.key: case_id for case_id, case in reversed(CASES.items())}
    return [
        case_id
        for case_id, case in CASES.items()
        if case_id == first[case.key] or (case.principal and (case.key == "1" or case.key.startswith("11")))
    ]


@functools.cache
def quick_cells() -> frozenset[Cell]:
    """The first model of every row, at stage 3 and world 2."""
    first = {(case.key, case.title): case_id for case_id, case in reversed(CASES.items())}
    return frozenset(Cell(3, 2, case_id) for case_id in first.values())
