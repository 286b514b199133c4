"""Compiled sharded models against plain torch, compiled in the same way: bit for bit.

`python -m tests.compile.table` plays the whole matrix compiled; here are the rows that a compiler could get wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.compile.driver import Compiled, How, compare
from tests.harness import Ranks

LIMIT = 100.0  # seconds for one case: compiling takes most of a few
# One way is enough where the row is about what happens around graphs and not in them.
WHOLE = (
    "6-window_retained-mlp",
    "10-tied-twin-mlp",
    "11c-different_units-mlp",
    "12-frozen_mid_run-mlp",
    "13-remat-mlp-remat-inside",
    "16b-weight_before_block-mlp",
    "15b-retained-compile-loop",
    "15b-retained-compile-branch",
)
PER_UNIT = (
    "1-plain-conv",
    "3-two_losses-mlp",
    "10-tied-cross-mlp",
    "13b-remat_twice-mlp-remat-inside",
    "13b-remat_twice-mlp-reentrant-around",
    "18-backward_raises-mlp",
    "29-functional_own-mlp",
    "30-lora_after-mlp",
    "15b-retained-compile-while",
)
BOTH = ("15b-retained-compile-disabled", "15b-trained-compile-edited", "15b-retained-compile-parent")
EVERYWHERE = "15b-retained-compile-straight"


def cells() -> Iterator[tuple[str, Compiled, int, int]]:
    model, units = Compiled(How.MODEL), Compiled(How.UNITS)
    yield from ((case, model, 3, 2) for case in WHOLE)
    yield from ((case, units, 3, 2) for case in PER_UNIT)
    yield from ((case, compiled, 3, 2) for case in BOTH for compiled in (model, units))
    for compiled in (model, units):
        yield from ((EVERYWHERE, compiled, stage, world) for stage, world in ((1, 2), (2, 2), (3, 2), (3, 1)))
        yield "15b-trained-compile-edited", replace(compiled, backend="eager"), 3, 2
        yield "15-other_sizes-mlp", replace(compiled, dynamic=True), 3, 2
    yield "15b-trained-compile-edited", units, 2, 2
    yield "6-window_retained-mlp", units, 1, 2
    yield "6-window_retained-mlp", units, 2, 2


def named(value: object) -> str:
    if not isinstance(value, Compiled):
        return str(value)
    return "-".join(str(part) for part in (value.how.value, value.backend, value.mode, value.dynamic) if part)


@pytest.mark.parametrize(("case", "compiled", "stage", "world"), list(cells()), ids=named)
def test_exact(ranks: Ranks, case: str, compiled: Compiled, stage: int, world: int) -> None:
    assert compare(ranks(world), case, stage, compiled, LIMIT) == []


INDUCTOR = [
    *((Compiled(How.UNITS, "inductor"), stage) for stage in (1, 2, 3)),
    (Compiled(How.MODEL, "inductor"), 3),
    (Compiled(How.UNITS, "inductor", mode="reduce-overhead"), 3),
]


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler, and there is no g++ here")
@pytest.mark.parametrize(("compiled", "stage"), INDUCTOR, ids=named)
def test_exact_with_inductor(ranks: Ranks, compiled: Compiled, stage: int) -> None:
    assert compare(ranks(2), "15b-retained-compile-one-unit", stage, compiled, LIMIT) == []
