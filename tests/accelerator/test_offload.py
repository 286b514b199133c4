"""Offload on the device: the CPU's numbers, without a race; what is where, and how often the host waits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.matrix import play_late
from tests.accelerator.offloading import (
    CPU,
    Way,
    backwards_from_cpu,
    checkpointed,
    measured,
    offloaded_activations,
    seen_by_hooks,
    train_late,
    train_on_cpu,
    with_inside,
)
from tests.accelerator.ranks import TELLING_MODES
from tests.harness import Ranks
from tests.patterns.cells import LIMIT
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.reference import play
from tests.stages import EACH_STAGE, OPPOSITE_STAGES

WORLD = 2
OFFLOADS = pytest.mark.parametrize("offload", ("optimizer", "parameters"))
# Where pages stay, at stages 1 and 2, "parameters" is "optimizer".
OFFLOADED_STAGES = pytest.mark.parametrize(
    ("stage", "offload"), ((1, "optimizer"), (2, "parameters"), (3, "optimizer"), (3, "parameters"))
)
ONCE = {"Event.synchronize": 1}


def check(ranks: Ranks, stage: int, mode: str, seed: int, way: Way, **options: Any) -> list[dict[str, int]]:
    """Trained with AdamW, it is what it is on the CPU. Returns how often the host waited, step by step."""
    pool = ranks(WORLD)
    want = pool.run(train_on_cpu, stage, way)
    got = pool.run(train_late, stage, mode, seed, way, **options)
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine.values) == len(theirs.values) > 0
        assert all(map(torch.equal, mine.values, theirs.values))
    assert got[0].waits == got[1].waits
    return got[0].waits


@OFFLOADED_STAGES
@TELLING_MODES
def test_training(late_ranks: Ranks, stage: int, offload: str, mode: str, seed: int) -> None:
    """The host waits once in a step: for gradients, when their norm is computed."""
    assert check(late_ranks, stage, mode, seed, Way(), offload=offload) == [ONCE] * 3


@OFFLOADED_STAGES
@pytest.mark.parametrize("backwards", (2, 4, 8))
def test_windows(late_ranks: Ranks, stage: int, offload: str, backwards: int) -> None:
    """What waits stays on the device, so that nothing but its sum crosses, at the window's end or at the step."""
    for window in ("coalesce", "no_sync"):
        way = Way(backwards, window)
        assert check(late_ranks, stage, "lazy", 0, way, offload=offload) == [ONCE] * 3


@pytest.mark.parametrize("backwards", (2, 4))
def test_a_backward_that_adds_to_gradients_is_waited_for(late_ranks: Ranks, backwards: int) -> None:
    """Once for all of its units. At stage 1 gradients wait for the step anyway."""
    for stage, waits in ((1, 1), (2, backwards - 1), (3, backwards - 1)):
        found = check(late_ranks, stage, "lazy", 0, Way(backwards), offload="parameters")
        assert found == [{"Event.synchronize": waits}] * 3


@OPPOSITE_STAGES
@OFFLOADS
@pytest.mark.parametrize("transport", ("collective", "one-sided"))
def test_masters(late_ranks: Ranks, stage: int, offload: str, transport: str) -> None:
    """fp32 on the host, cast there; bf16 on the way to the device and on it."""
    pool = late_ranks(WORLD)
    want = pool.run(train_on_cpu, stage, Way(), precision="bf16")
    options = {"precision": "bf16", "offload": offload, "transport": transport}
    got = pool.run(train_late, stage, "lazy", 0, Way(), exact=True, **options)  # of bf16 a backend makes another sum
    for mine, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, mine.values, theirs.values))


# A row of each kind, with the transport that it wants.
ROWS = (
    ("22-plain-gpt", 3, "collective"),
    ("22-no_sync-mlp", 2, "collective"),
    ("22-frozen_mid_run-mlp", 3, "one-sided"),
    ("22c-edited_full-gpt", 2, "collective"),
    ("22c-edited_full-gpt", 3, "collective"),
    ("22b-optimizer_unused_later-gpt", 1, "collective"),
    ("22b-parameters_unused_later-gpt", 3, "collective"),
    ("14-penalise_parameters-mlp", 3, "collective"),
    ("31j-penalties-mlp", 2, "collective"),
    ("11e-unequal_backwards-mlp", 3, "one-sided"),
    ("24c-edited_leaves-mlp", 3, "collective"),
    ("24c-edited_leaves-mlp", 2, "one-sided"),
    ("24-step_in_hook-mlp", 3, "collective"),
)


@pytest.mark.parametrize(("case_id", "stage", "transport"), ROWS)
@pytest.mark.parametrize(("mode", "seed"), (("lazy", 0), ("random", 1)))
def test_rows(late_ranks: Ranks, case_id: str, stage: int, transport: str, mode: str, seed: int) -> None:
    options = {"exact": True, "transport": transport, "offload": CASES[case_id].offload or "parameters"}
    got = late_ranks(WORLD).run(play_late, case_id, stage, mode, seed, timeout=LIMIT, **options)
    want = expected(case_id, WORLD, stage)
    for rank in range(WORLD):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


@OFFLOADED_STAGES
@pytest.mark.parametrize("precision", (None, "bf16"))
def test_what_is_on_the_device_between_steps(
    late_ranks: Ranks, stage: int, offload: str, precision: str | None
) -> None:
    """No leaf, gradient or optimizer state: at stages 1 and 2 pages; at stage 3 their sources, or nothing."""
    for found in late_ranks(WORLD).run(measured, stage, offload, precision):
        pages = found.pages if stage < 3 else 0
        sources = found.sources if stage == 3 and offload == "optimizer" else 0
        assert found.found == found.stubs + pages + sources
        assert found.placed == {"cpu"}
        assert found.said.startswith(f"offload of {offload}: ") and "in the host's memory" in found.said


@OFFLOADED_STAGES
def test_checkpoints(late_ranks: Ranks, tmp_path: Path, stage: int, offload: str) -> None:
    """With offload or without, one is the other's. Writing to shards from files leaves no wait behind."""
    for wrong in late_ranks(WORLD).run(checkpointed, stage, str(tmp_path), offload):
        assert wrong == []


@OPPOSITE_STAGES
@pytest.mark.parametrize(("mode", "seed"), (("lazy", 0), ("sides", 0)))
def test_hooks_and_captured_gradients_show_what_has_come(late_ranks: Ranks, stage: int, mode: str, seed: int) -> None:
    for pairs in late_ranks(WORLD).run(seen_by_hooks, stage, mode, seed):
        assert len(pairs) == 3
        assert all(torch.equal(one, other) for one, other in pairs)


@EACH_STAGE
def test_activations_on_the_cpu(late_ranks: Ranks, stage: int) -> None:
    """By torch's own hooks, around the model and inside it: they get activations; weights stay handles."""
    plain = with_inside(CPU)
    whole: list[list[int]] = []
    play(plain, WORLD, lambda model, rank: whole.append(backwards_from_cpu(model, CPU, rank)), stage)
    want = [parameter.grad for parameter in plain.parameters()]
    for on_device, offload in ((False, "parameters"), (True, None), (True, "parameters")):
        for rank, saved in enumerate(late_ranks(WORLD).run(offloaded_activations, stage, on_device, offload)):
            assert all(map(torch.equal, saved.grads, want))
            weights = Counter(whole[rank]) - Counter(saved.packed)
            assert set(weights) <= {parameter.numel() for parameter in plain.parameters()} and weights
            assert not Counter(saved.packed) - Counter(whole[rank])
