"""Pipelines on the test device against plain torch on the CPU, whose kernels it has."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograde as rg
from tests.accelerator import device
from tests.pipeline.cases import CASES, Case, Data, backward_order, plain_step

STEPS = 2


def steps(rank: int, world: int, schedule: str, names: Sequence[str], mode: str, seed: int) -> list[str]:
    """Two steps of each case, the second on top of the first: what differs, and what the host waited for in them."""
    where = device.of_rank(rank)
    wrong = []
    for name in names:
        torch.manual_seed(0)
        case = CASES[name]
        blocks = case.blocks()
        pipe = pipeline_of(case, blocks, where, schedule)
        batches = [case.data() for _ in range(STEPS)]
        order = backward_order(pipe.schedule)
        wanted = [plain_step(blocks, data, case.loss, order) for data in batches]
        with device.use(mode, seed), torch.device(where):
            losses = [step(pipe, data, where) for data in batches]
            waits = device.synchronisations()
            if waits:
                wrong.append(f"{name}: the host waited for {waits}")
            wrong += [
                f"{name}: step {number}: loss {found}, torch {want}"
                for number, (found, want) in enumerate(zip(map(_host, losses), wanted, strict=True))
                if not case.same(found, want)
            ]
            wrong += [f"{name}: {text}" for text in differences(pipe, blocks, case)]
        dist.barrier()
    return wrong


def pipeline_of(case: Case, blocks: list[nn.Module], where: torch.device, schedule: str, **options: Any) -> rg.Pipeline:
    moved = list(device.move(nn.ModuleList(copy.deepcopy(blocks)), where))
    return rg.Pipeline(moved, schedule=schedule, microbatches=4, loss=case.loss, **options)


def step(pipe: rg.Pipeline, data: Data, where: torch.device) -> Tensor:
    args, target, options = pytree.tree_map_only(Tensor, lambda t: sent(t, where), tuple(data))
    return pipe.step(*(args if 0 in pipe.stages else ()), target=target, **options)


def sent(tensor: Tensor, where: torch.device) -> Tensor:
    """Without waiting."""
    return tensor.pin_memory().to(where, non_blocking=True)


def differences(pipe: rg.Pipeline, blocks: Sequence[nn.Module], case: Case) -> list[str]:
    whole = dict(nn.ModuleList(blocks).named_parameters(remove_duplicate=False))
    wrong = []
    for name, parameter in pipe.named_parameters():
        want, found = whole[name].grad, parameter.grad
        if (want is None) != (found is None):
            wrong.append(f"{name} has gradient {found is not None}, torch {want is not None}")
        elif want is not None and found is not None and not case.same(_host(found), want):
            wrong.append(f"{name} differs")
    return wrong


def _host(tensor: Tensor) -> Tensor:
    with torch.device("cpu"):
        return tensor.cpu()
