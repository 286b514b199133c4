"""Blocks to stages: the optimum by enumeration, and split points by name."""

import itertools
import random

import pytest

from retrograde.errors import ScheduleError
from retrograde.pipeline.partition import balance, cut_before


def loads(weights: list[float], stages: tuple[range, ...]) -> list[float]:
    return [sum(weights[block] for block in stage) for stage in stages]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed: int) -> None:
    chance = random.Random(seed)
    weights = [float(chance.randint(0, 9)) for _ in range(chance.randint(3, 9))]
    for stages in range(1, len(weights) + 1):
        found = balance(weights, stages)
        assert [block for stage in found for block in stage] == list(range(len(weights)))
        assert len(found) == stages and all(found)
        merits = []
        for cuts in itertools.combinations(range(1, len(weights)), stages - 1):
            bounds = [0, *cuts, len(weights)]
            sums = [sum(weights[low:high]) for low, high in itertools.pairwise(bounds)]
            merits.append((max(sums), sum(load**2 for load in sums)))
        sums = loads(weights, found)
        assert (max(sums), sum(load**2 for load in sums)) == min(merits)


def test_equal_blocks_are_spread_evenly() -> None:
    assert [len(stage) for stage in balance([1.0] * 8, 4)] == [2, 2, 2, 2]
    assert sorted(len(stage) for stage in balance([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_heavy_end_gets_fewer_blocks() -> None:
    assert balance([1, 1, 1, 1, 1, 1, 4], 3) == (range(3), range(3, 6), range(6, 7))


@pytest.mark.parametrize("stages", [0, 4])
def test_too_many_stages_are_refused(stages: int) -> None:
    with pytest.raises(ScheduleError, match=f"3 blocks cannot be cut into {stages} stages"):
        balance([1.0, 1.0, 1.0], stages)


def test_split_points() -> None:
    names = ["embed", "h.0", "h.1", "h.2", "head"]
    assert cut_before(names, ["h.1", "head"]) == (range(2), range(2, 4), range(4, 5))
    assert cut_before(names, []) == (range(5),)
    with pytest.raises(ScheduleError, match=r"split point 'h.7' is not a block; the blocks are embed, h.0"):
        cut_before(names, ["h.7"])
    for points in (["head", "h.1"], ["h.1", "h.1"], ["embed"]):
        with pytest.raises(ScheduleError, match="must be in the order of the model"):
            cut_before(names, points)
