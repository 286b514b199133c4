"""Arguments that are wrong on one rank, or that differ between ranks: every rank is told, and nothing is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import retrograde as rg
from tests.harness import Ranks
from tests.pipeline.cases import WIDTH, linears
from tests.small import Small, batch, build, loss_of, shards_after_a_mistake


def pipe_arguments() -> dict[str, Any]:
    return {"model": linears(4), "schedule": "1f1b", "microbatches": 2, "loss": F.mse_loss}


# ---- one rank alone is wrong
ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "timeout": ({"timeout": math.nan}, "timeout=nan"),
    "prefetch": ({"prefetch": "no"}, "prefetch='no'"),
    "exact": ({"exact": "x"}, "exact='x'"),
    "model": ({"model": None}, "model=None"),
    "units": ({"units": 5}, "units=5"),
    "join": ({"join": "few"}, "join='few'"),
}


def alone(rank: int, world: int, name: str) -> str:
    model = build()
    wrong = ALONE[name][0] if rank == 1 else {}
    text = "nothing was raised"
    try:
        rg.shard(**({"model": model, "timeout": 5.0} | wrong))
    except rg.RetrogradeError as error:
        text = f"{type(error).__name__}: {error}"
    shards_after_a_mistake(model, rank, timeout=10)
    return text


@pytest.mark.parametrize("name", ALONE)
def test_a_wrong_argument_on_one_rank_is_told_to_all(ranks: Ranks, name: str) -> None:
    told, mistaken = ranks(2).run(alone, name)
    assert mistaken.startswith(f"ShardingError: {ALONE[name][1]}")
    assert told == f"DivergenceError: rank 1: shard() raised {mistaken}"


PIPES_ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "microbatches": ({"microbatches": "4"}, "microbatches='4'"),
    "schedule": ({"schedule": "nope"}, "schedule='nope'"),
    "model": ({"model": None}, "model=None"),
    "loss": ({"loss": 5}, "loss=5"),
    "cut": ({"cut": "0.1"}, "cut='0.1'"),
}


def pipe_alone(rank: int, world: int, name: str) -> str:
    arguments = pipe_arguments()
    text = "nothing was raised"
    try:
        rg.Pipeline(**(arguments | (PIPES_ALONE[name][0] if rank == 1 else {})))
    except rg.RetrogradeError as error:
        text = str(error)
    pipe = rg.Pipeline(**arguments)
    assert math.isfinite(pipe.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH)))
    return text


@pytest.mark.parametrize("name", PIPES_ALONE)
def test_a_wrong_pipeline_on_one_rank_is_told_to_all(ranks: Ranks, name: str) -> None:
    told, mistaken = ranks(2).run(pipe_alone, name)
    assert mistaken.startswith(PIPES_ALONE[name][1])
    assert told == f"rank 1: Pipeline() raised {mistaken}"


def batch_alone(rank: int, world: int) -> str:
    """The rank of the first stage alone has a batch that cannot be cut."""
    pipe = rg.Pipeline(linears(4), schedule="zb-h1", microbatches=4, loss=F.mse_loss)
    rows = torch.ones(8, WIDTH)
    text = "nothing was raised"
    try:
        pipe.step(torch.ones(3, WIDTH) if rank == 0 else rows, target=rows)
    except rg.PipelineError as error:
        text = str(error)
    assert all(p.grad is None for p in pipe.parameters())
    assert math.isfinite(pipe.step(rows, target=rows))
    return text


def test_a_wrong_batch_on_one_rank_is_told_to_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(batch_alone)
    assert first == second
    assert first.startswith("rank 0: args: a tensor of shape [3, 8] cannot be cut into 4 microbatches")


# ---- ranks that differ
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "stage": (2, 3, "stage=2 on rank 0, stage=3 on rank 1"),
    "reduce": ("mean", "sum", "reduce='mean' on rank 0, reduce='sum' on rank 1"),
    "exact": (True, False, "exact=True on rank 0, exact=False on rank 1"),
    "prefetch": (False, True, "prefetch=False on rank 0, prefetch=True on rank 1"),
    "resident": ("1KiB", 2048, "resident='1KiB' on rank 0, resident=2048 on rank 1"),
    "precision": (
        rg.Precision(reduce="bf16"),
        None,
        "precision=Precision(reduce='bf16') on rank 0, precision=None on rank 1",
    ),
}


def different(rank: int, world: int, name: str) -> str:
    model = build()
    text = "nothing was raised"
    try:
        rg.shard(model, **{name: DIFFERENT[name][rank]})
    except rg.ShardingError as error:
        text = str(error)
    assert type(model) is Small
    rg.shard(model)
    loss_of(model, batch(rank)).backward()
    dist.barrier()
    return text


@pytest.mark.parametrize("name", DIFFERENT)
def test_arguments_that_differ_between_ranks(ranks: Ranks, name: str) -> None:
    for rank, text in enumerate(ranks(2).run(different, name)):
        assert text.startswith(f"rank {rank}: shard() has different arguments: {DIFFERENT[name][2]}; ")
        assert text.endswith("give the same on every rank")


def equal_in_other_words(rank: int, world: int) -> None:
    """1 KiB is 1024 bytes; residency means nothing at stage 2; fp32 is torch.float32."""
    rg.shard(build(), resident="1KiB" if rank else 1024)
    rg.shard(build(), 2, resident="1KiB" if rank else 0)
    rg.shard(build(), precision=rg.Precision(reduce="bf16" if rank else torch.bfloat16))
    dist.barrier()


def test_equal_arguments_in_other_words(ranks: Ranks) -> None:
    ranks(2).run(equal_in_other_words)


DIFFERENT_PIPES: dict[str, tuple[Any, Any, str]] = {
    "microbatches": (2, 4, "microbatches=2 on rank 0, microbatches=4 on rank 1"),
    "schedule": ("1f1b", "gpipe", "schedule='1f1b' on rank 0, schedule='gpipe' on rank 1"),
    "loss_reduction": ("sum", "mean", "loss_reduction='sum' on rank 0, loss_reduction='mean' on rank 1"),
    "cut": (rg.Cut(at=["1"]), None, "cut at ['1'] on rank 0, cut at ['2'] on rank 1"),
}


def different_pipes(rank: int, world: int, name: str) -> str:
    arguments = pipe_arguments()
    text = "nothing was raised"
    try:
        rg.Pipeline(**(arguments | {name: DIFFERENT_PIPES[name][rank]}))
    except rg.PipelineError as error:
        text = str(error)
    rg.Pipeline(**arguments).step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    return text


@pytest.mark.parametrize("name", DIFFERENT_PIPES)
def test_pipelines_that_differ_between_ranks(ranks: Ranks, name: str) -> None:
    for text in ranks(2).run(different_pipes, name):
        assert text == f"Pipeline() has different arguments: {DIFFERENT_PIPES[name][2]}; give the same on every rank"
