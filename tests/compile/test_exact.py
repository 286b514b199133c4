"""Compiled sharded models against plain torch, compiled in the same way: bit for bit.

`python -m tests.compile.table` plays the whole matrix compiled; here are the rows that a compiler could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.compile.driver import Compiled, How, play_compiled
from tests.compile.models import COMPILE_CASES
from tests.harness import RankPool

LIMIT = 100.0  # seconds for one case: compiling takes most of a few
# One way is enough where the row is about what happens around graphs and not in them.
WHOLE = (
    "3-two_losses-gpt",
    "6-window_retained-mlp",
    "10-tied-tied-gpt",
    "11c-different_units-mlp",
    "12-frozen_mid_run-mlp",
    "13-remat-mlp-remat-inside",
    "13-remat-mlp-reentrant-around",
    "16b-weight_before_block-mlp",
)
PER_UNIT = (
    "1-plain-conv",
    "9-tiled_loss-gpt",
    "10-tied-cross-mlp",
    "13b-remat_twice-mlp-remat-inside",
    "13b-remat_twice-mlp-reentrant-around",
    "18-backward_raises-mlp",
    "29-functional_own-mlp",
    "30-lora_after-mlp",
)
EVERYWHERE = ("15b-retained-compile-straight", "15b-trained-compile-parent")


def cells() -> Iterator[tuple[str, How, int, int]]:
    yield from ((case, How.MODEL, 3, 2) for case in WHOLE)
    yield from ((case, How.UNITS, 3, 2) for case in PER_UNIT)
    for case in COMPILE_CASES:
        if case not in EVERYWHERE:
            yield from ((case, how, 3, 2) for how in How)
    for case in EVERYWHERE:
        yield from ((case, how, stage, world) for how in How for stage in (1, 2, 3) for world in (1, 2))
    yield "6-window_retained-mlp", How.UNITS, 1, 2
    yield "6-window_retained-mlp", How.UNITS, 2, 2


@pytest.mark.parametrize(("case", "how", "stage", "world"), list(cells()))
def test_exact(ranks: Callable[[int], RankPool], case: str, how: How, stage: int, world: int) -> None:
    for rank, found in enumerate(ranks(world).run(play_compiled, case, stage, Compiled(how), timeout=LIMIT)):
        assert not found, f"rank {rank}: " + "\n".join(found[:12])


@pytest.mark.parametrize("how", How)
def test_exact_with_inductor(ranks: Callable[[int], RankPool], how: How) -> None:
    compiled = Compiled(how, "inductor")
    for rank, found in enumerate(ranks(2).run(play_compiled, "3-two_losses-mlp", 3, compiled, timeout=LIMIT)):
        assert not found, f"rank {rank}: " + "\n".join(found[:12])
