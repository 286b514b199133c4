"""What `make quick` runs: something of every kind of test, mostly at stage 3 and world 2, in less than two minutes.

A test is quick if its file or its folder is in the table, and every choice beside it takes it. Whatever sleeps,
compiles, starts programs or needs other worlds of ranks is left to `make test`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patterns.cells import Cell, quick_cells

TESTS = Path(__file__).parent
Choice = Callable[[pytest.Item], bool]


def _arguments(item: pytest.Item) -> dict[str, Any]:
    """What a parametrized test is given."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def at(**wanted: object) -> Choice:
    """Tests with these arguments, and those that do not have them."""

    def chosen(item: pytest.Item) -> bool:
        given = _arguments(item)
        return all(given.get(name, value) == value for name, value in wanted.items())

    return chosen


def only(*names: str) -> Choice:
    return lambda item: item.name.partition("[")[0] in names


def without(*names: str) -> Choice:
    return lambda item: item.name.partition("[")[0] not in names


def one_model_per_row(item: pytest.Item) -> bool:
    return Cell(**_arguments(item)) in quick_cells()


USUAL = at(stage=3, world=2)

QUICK: dict[str, tuple[Choice, ...]] = {
    "unit": (),
    "streams": (without("test_the_example_shows_the_race_and_its_end"),),
    "memory": (USUAL,),
    "patterns/test_matrix.py": (one_model_per_row,),
    "patterns/test_oracle.py": (only("test_means_are_those_of_the_joint_batch", "test_differences_are_seen"),),
    "deepspeed/test_loop.py": (USUAL, only("test_weights_are_plain_torchs", "test_clipping")),
    "deepspeed/test_backward.py": (USUAL, only("test_gradients_are_plain_torchs", "test_several_engines_in_one_loss")),
    "deepspeed/test_coalescing.py": (USUAL, without("test_matrix")),
    "deepspeed/test_order.py": (USUAL,),
    "deepspeed/test_zero.py": (USUAL,),
    "checkpoint/test_damaged.py": (),
    "checkpoint/test_saving.py": (only("test_keep", "test_every_state_that_a_crash_can_leave"),),
    "fuzz/test_fuzz.py": (at(world=2, delay=None),),
    "order/test_parts.py": (),
    "multiproc/test_arguments.py": (),
    "multiproc/test_divergence.py": (
        USUAL,
        only("test_ranks_that_ask_for_different_things", "test_random_units_orders_and_counts_per_rank"),
    ),
    "multiproc/test_gradients.py": (USUAL, without("test_empty_pieces")),
    "multiproc/test_idioms.py": (USUAL,),
    "multiproc/test_masters.py": (USUAL, only("test_edits", "test_what_is_whole")),
    "multiproc/test_nested.py": (at(stage=3, late=0), without("test_four_ranks_that_nest_differently")),
    "multiproc/test_semantics.py": (USUAL,),
    "multiproc/test_state.py": (USUAL,),
    "multiproc/test_windows.py": (USUAL, without("test_exact_at_every_world")),
    "transport/test_counts.py": (USUAL,),
    "transport/test_hostile.py": (),
    "transport/test_mirrored_edits.py": (USUAL,),
    "transport/test_mirrors.py": (USUAL,),
    "transport/test_wire.py": (USUAL,),
    "pipeline/test_pipeline.py": (only("test_two_ranks"), at(schedule="zb-v")),
    "pipeline/test_schedules_dryrun.py": (),
    "pipeline/test_schedules_lowering.py": (),
    "pipeline/test_schedules_text.py": (),
    "pipeline/test_split.py": (without("test_compiled"),),
}


def choices(path: Path) -> tuple[Choice, ...] | None:
    """Of the tests of a file; None if none is quick."""
    here = path.relative_to(TESTS)
    for place in (here, *here.parents):
        if place.as_posix() in QUICK:
            return QUICK[place.as_posix()]
    return None


def is_quick(item: pytest.Item) -> bool:
    chosen = choices(item.path)
    return chosen is not None and all(choice(item) for choice in chosen)
