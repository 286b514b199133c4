"""Memory as arithmetic: what the sums of gradients hold while a backward goes on, and after it."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.live import live_bytes, present_storages
from tests.stages import EACH_STAGE, REDUCING_STAGES

_LAYERS, _WIDTH = 8, 64
_ELEMENTS = _WIDTH**2 // 2  # of a layer, on one of two ranks


class _Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def _growth(rank: int, world: int, stage: int, dtype: torch.dtype) -> int:
    """From when the last layer's gradient has been sent to when the second one's has."""
    model = nn.Sequential(*(_Layer(dtype) for _ in range(_LAYERS)))
    rg.shard(model, stage, units=(_Layer,))
    held: list[int] = []

    def look(_: Tensor) -> None:
        dist.barrier()  # what other ranks have sent is there
        held.append(live_bytes())

    for _ in range(2):  # pages and buckets are there the second time
        held.clear()
        x = torch.ones(1, _WIDTH, dtype=dtype)
        for index, layer in enumerate(model):
            x = layer(x)
            if index < _LAYERS - 1:
                x.register_hook(look)  # called when the layer after this one has sent its gradient
        x.float().sum().backward()
    return held[-1] - held[0]


@REDUCING_STAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_finished_when_all_ranks_have_brought_their_part(ranks: Ranks, stage: int, dtype: torch.dtype) -> None:
    shard = _ELEMENTS * dtype.itemsize
    under_way = shard + _ELEMENTS * torch.float32.itemsize  # of one layer: another rank's part, and what is added up
    for grown in ranks(2).run(_growth, stage, dtype):
        assert grown <= (_LAYERS - 2) * shard + under_way


def _after_each_backward(rank: int, world: int, stage: int) -> list[int]:
    model = nn.Sequential(*(_Layer(torch.bfloat16) for _ in range(_LAYERS)))
    rg.shard(model, stage, units=(_Layer,))
    held: list[int] = []
    gc.collect()
    gc.disable()  # a cycle would keep what it refers to
    try:
        for _ in range(4):
            model(torch.ones(1, _WIDTH, dtype=torch.bfloat16)).float().sum().backward()
            dist.barrier()
            held.append(sum(present_storages().values()))
            dist.barrier()  # nobody has sent anything of the next backward
    finally:
        gc.enable()
    return held


@EACH_STAGE
def test_nothing_of_a_backward_outlives_it_but_what_it_added_up(ranks: Ranks, stage: int) -> None:
    for first, *others in ranks(2).run(_after_each_backward, stage):
        assert others == [first] * len(others)
