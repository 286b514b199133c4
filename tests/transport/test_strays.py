"""Ranks that stray from the order of collectives: exact values, messages counted, and nothing hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from retrograde.transport.collective.communicator import Communicator, Offer
from retrograde.transport.collective.courtesy import is_absent, present_parts
from retrograde.transport.connections import Connections
from retrograde.transport.messages import Message
from tests.harness import Ranks
from tests.patterns.cells import LIMIT
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.reference import Program
from tests.small import DIM, Small, batch, build, loss_of
from tests.stages import EACH_STAGE, OPPOSITE_STAGES, WITH_OTHERS

STEPS = 5
STRAY_AT = 3  # the step in which a rank does something else: the order knows the others' steps by then
# A row of each kind of divergence.
ROWS = (
    "11b-parameter_on_first_rank-mlp",
    "11b-unit_on_first_rank_retained-mlp",
    "11c-changing_units-mlp",
    "11d-other_order-mlp",
    "11e-unequal_backwards_then_edit-mlp",
    "11e-work_on_first_rank-mlp",
)


@pytest.mark.parametrize("case_id", ROWS)
@OPPOSITE_STAGES
@WITH_OTHERS
def test_rows(ranks: Ranks, world: int, case_id: str, stage: int) -> None:
    got = ranks(world).run(play_rank, case_id, stage, timeout=LIMIT, transport="collective")
    want = expected(case_id, world, stage)
    for rank in range(world):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


# ---- absent parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_what_is_absent_is_told_from_zeros_and_from_nans(dtype: torch.dtype) -> None:
    absent = torch.empty(3, dtype=dtype)
    absent.view(torch.uint8).fill_(255)
    rows = [torch.zeros(3, dtype=dtype), absent, torch.full((3,), torch.nan, dtype=dtype), absent.clone()]
    rows[3][2] = 1  # one element of it says something
    assert [is_absent(row) for row in rows] == [False, True, False, False]
    assert list(present_parts(torch.cat(rows), 4)) == [0, 2, 3]
