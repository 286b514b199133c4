"""Sharded models on the device: rows of the matrix in every order of execution, exact and without a race."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograde as rg
from tests.accelerator import device
from tests.accelerator.matrix import play_late
from tests.accelerator.ranks import EACH_MODE
from tests.harness import Ranks
from tests.patterns.cells import LIMIT
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences

WORLD = 2
# One row of each kind of thing that may go wrong between streams; tests/accelerator/table.py plays all of them.
ROWS = (
    "1-plain-gpt",
    "3-two_losses-mlp",
    "6b-two_windows-mlp",
    "11e-unequal_backwards-mlp",
    "24-tensor_hooks_window-mlp",
    "31n-filled_anew-gpt",
)


def check(ranks: Ranks, case_id: str, stage: int, mode: str, seed: int) -> None:
    got = ranks(WORLD).run(play_late, case_id, stage, mode, seed, timeout=LIMIT)
    want = expected(case_id, WORLD, stage)
    for rank in range(WORLD):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


@pytest.mark.parametrize("case_id", ROWS)
@EACH_MODE
def test_rows(late_ranks: Ranks, case_id: str, mode: str, seed: int) -> None:
    check(late_ranks, case_id, 3, mode, seed)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages(late_ranks: Ranks, stage: int) -> None:
    for case_id in ("1-plain-gpt", "2-accumulate-mlp"):
        check(late_ranks, case_id, stage, "lazy", 0)


class _Mixed(nn.Module):
    def __init__(self, where: torch.device) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, device=where)
        self.table = nn.Embedding(4, 4)


def _refusals(rank: int, world: int) -> str:
    where = device.of_rank(rank)
    with pytest.raises(rg.ShardingError) as mixed:
        rg.shard(_Mixed(where), timeout=10.0)
    return str(mixed.value)


def test_a_model_on_two_devices_is_refused(late_ranks: Ranks) -> None:
    for rank, text in enumerate(late_ranks(WORLD).run(_refusals)):
        assert f"parameter table.weight is on cpu and the model's first one on late:{rank}" in text
