"""What `make test` leaves to `make test-all`: further orders, worlds, models and schedules of what it runs once.

A test is thorough if its file is in the table, and one of the choices beside it takes it. `make test` has to be over in
fifteen minutes on two cores; whoever adds what takes long puts something here. What stays in `make test` is every kind
of thing at least once, at each stage where stages differ."""

from __future__ import annotations

import pytest

from tests.quick import TESTS, arguments, only


class But:
    """Tests of this name, but for those with these arguments; all of them, if none are given."""

    def __init__(self, name: str, /, **kept: tuple[object, ...]) -> None:
        self.name = name
        self._kept = kept

    def __call__(self, item: pytest.Item) -> bool:
        if not only(self.name)(item):
            return False
        given = arguments(item)
        return not self._kept or any(given[argument] not in values for argument, values in self._kept.items())


EVERYTHING: tuple[But, ...] = ()  # of a file

THOROUGH: dict[str, tuple[But, ...]] = {
    # Benchmarks at their smallest: they start programs, of which each imports torch and its peers.
    "multiproc/test_benchmarks.py": EVERYTHING,
    "pipeline/test_benchmark.py": EVERYTHING,
    "pipeline/test_pipeline.py": (But("test_two_ranks", schedule=("1f1b", "zb-h1", "zb-v")),),
    "pipeline/test_zero.py": (But("test_two_by_two", schedule=("1f1b", "zb-h1", "zb-v", "dualpipe-v")),),
    "pipeline/test_steps.py": (But("test_compiled_blocks", schedule=("1f1b", "zb-v")),),
    "pipeline/test_shares.py": (
        But("test_compiled", name=("Llama", "T5")),
        But("test_compiled_under_autocast", name=("ViT",)),
    ),
    "compile/test_exact.py": (But("test_exact", stage=(3,), world=(2,)),),
    "compile/test_leaves.py": (But("test_idiom", stage=(3,)),),
    "fuzz/test_fuzz.py": (But("test_programs", world=(2, 4), delay=(1,)),),
    "multiproc/test_precision.py": (But("test_training", world=(2,)),),
    "multiproc/test_amp.py": (But("test_grad_scaler", world=(2,)),),
    "multiproc/test_nested.py": (But("test_ranks_that_nest_differently", stage=(1, 3), late=(1,)),),
    "multiproc/test_edits.py": (But("test_an_edit_by_a_function_before_others_have_read", stage=(2,)),),
    "multiproc/test_budget.py": (But("test_ranks_that_diverge_in_a_budgeted_window", world=(2,)),),
    "transport/test_first_cause.py": (But("test_survivors_name_the_rank_that_died", seed=(0, 3)),),
    "order/test_random.py": (But("test_random_programs", first=(0, 250)),),
    "checkpoint/test_loaded.py": (But("test_at_every_stage", kind=("adamw", "muon", "adamw in bf16")),),
    "accelerator/test_offload.py": (
        But("test_windows", backwards=(4,)),
        But("test_rows", mode=("lazy",)),
        But("test_training", mode=("lazy", "random")),
        But("test_a_backward_that_adds_to_gradients_is_waited_for", backwards=(2,)),
    ),
    "accelerator/test_pipelines.py": (
        But("test_transformer", mode=("lazy", "random")),
        But("test_kinds_of_models", schedule=("zb-v",)),
    ),
    "accelerator/test_engine.py": (But("test_rows", mode=("lazy", "random")),),
    # Others are waited for before a rank goes on without them, which takes seconds.
    "accelerator/test_strays.py": (
        But("test_a_stray_is_served_and_exact", world=(2,), stage=(2,)),
        But("test_a_stray_is_served_in_the_backends_order", stage=(3,)),
        But("test_several_ranks_in_the_backends_order", kind=("skips a unit",)),
        But("test_in_every_order", mode=("random",)),
    ),
    "accelerator/test_replicas.py": (
        But("test_in_every_order", mode=("sides", "random")),
        But("test_rows", case_id=("11f-replicated_changing_units-mlp",)),
        But(
            "test_strays", stage=(2,), kind=("takes another order", "one backward fewer", "evaluates before a barrier")
        ),
        But("test_strays_in_every_order", mode=("sides",)),
        But("test_strays_with_hooks", kind=("skips a unit",)),
    ),
    "transport/test_replica_calls.py": (
        But("test_a_stray_is_served_and_exact", stage=(1, 3)),
        But("test_ranks_that_differ", stage=(2, 3)),
    ),
    "transport/test_strays.py": (But("test_a_stray_is_served_and_exact", stage=(1, 3)),),
    "accelerator/test_overlap.py": (But("test_the_same_numbers_compiled"),),
}


def is_thorough(item: pytest.Item) -> bool:
    name = item.path.relative_to(TESTS).as_posix()
    if name not in THOROUGH:
        return False
    choices = THOROUGH[name]
    return choices is EVERYTHING or any(choice(item) for choice in choices)
