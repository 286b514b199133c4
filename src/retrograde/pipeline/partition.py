"""Decides which blocks of a model form a stage: contiguous runs whose heaviest is as light as possible."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from retrograde.errors import ScheduleError


def balance(weights: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut blocks with these weights (parameters, or measured times) into `stages` runs, none empty.

    The heaviest run is as light as possible; among such cuts the sum of squares is least, so that the others are
    even too.
    """
    if not 1 <= stages <= len(weights):
        raise ScheduleError(f"{len(weights)} blocks cannot be cut into {stages} stages; each stage needs a block")
    if any(weight < 0 for weight in weights):
        raise ScheduleError(f"the weights of blocks must not be negative: {list(weights)}")
    total = [0.0, *accumulate(weights)]
    limit = _least(total, stages, max, math.inf).value
    cuts = _least(total, stages, lambda others, load: others + load**2, limit).cuts
    return _ranges([*cuts, len(weights)])


class _Best(NamedTuple):
    value: float
    cuts: tuple[int, ...]  # where each stage starts


def _least(total: Sequence[float], stages: int, join: Callable[[float, float], float], limit: float) -> _Best:
    """Find the cut whose loads, combined one after the other by `join`, give the least value; none is over `limit`."""
    none = _Best(math.inf, ())
    best = [_Best(0.0, ()), *[none] * (len(total) - 1)]  # best[n]: of the first n blocks, in the stages so far
    for stage in range(1, stages + 1):
        fresh = [none] * len(total)
        for end in range(stage, len(total)):
            choices = (
                _Best(join(best[cut].value, total[end] - total[cut]), (*best[cut].cuts, cut))
                for cut in range(stage - 1, end)
                if total[end] - total[cut] <= limit
            )
            fresh[end] = min(choices, default=none)
        best = fresh
    return best[-1]


def _ranges(bounds: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(low, high) for low, high in pairwise(bounds))


def cut_before(names: Sequence[str], points: Sequence[str]) -> tuple[range, ...]:
    """Cut into stages that start at the first block and at the blocks named by `points`."""
    unknown = [point for point in points if point not in names]
    if unknown:
        raise ScheduleError(f"split point {unknown[0]!r} is not a block; the blocks are {', '.join(names)}")
    cuts = [names.index(point) for point in points]
    if any(high <= low for low, high in zip([0, *cuts], cuts, strict=False)):
        raise ScheduleError(
            f"split points {', '.join(points)} must be in the order of the model, each once, and not its first block"
        )
    return _ranges([0, *cuts, len(names)])
