"""Sharded models on the device: rows of the matrix in every order of execution, exact and without a race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from retrograde.transport.staged import StagedShards
from tests.accelerator import device
from tests.accelerator.matrix import play_late
from tests.accelerator.ranks import TELLING_MODES
from tests.accelerator.training import build, counted_step
from tests.harness import Ranks
from tests.patterns.cells import LIMIT
from tests.patterns.models import SPECS
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.stages import EACH_STAGE, GRADIENT_STAGES

WORLD = 2
# One row of each kind of thing that may go wrong between streams; tests/accelerator/table.py plays all of them.
ROWS = (
    ("1-plain-gpt", "collective"),
    ("3-two_losses-mlp", "collective"),
    ("6b-two_windows-mlp", "collective"),
    ("14-penalise_parameters-mlp", "collective"),
    ("24c-edited_full-gpt", "collective"),
    ("11b-unit_on_first_rank_retained-mlp", "collective"),
    ("11c-changing_units-mlp", "collective"),
    ("11d-other_order-mlp", "collective"),
    ("11e-unequal_backwards_then_edit-mlp", "collective"),
    ("11f-replicated_changing_units-mlp", "collective"),
    ("6b-two_windows-mlp", "one-sided"),
    ("11e-unequal_backwards-mlp", "one-sided"),
    ("24-tensor_hooks_window-mlp", "one-sided"),
    ("31n-filled_anew-gpt", "one-sided"),
    ("1-plain-lstm", "one-sided"),  # of which parts run in autograd's threads, where gradients are off
    ("33-plain-gpt", "collective"),
    ("33g-edited_leaves-mlp", "one-sided"),
)


def check(ranks: Ranks, case_id: str, stage: int, mode: str, seed: int, transport: str) -> None:
    options = {"exact": True, "transport": transport}
    got = ranks(WORLD).run(play_late, case_id, stage, mode, seed, timeout=LIMIT, **options)
    want = expected(case_id, WORLD, stage)
    for rank in range(WORLD):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


@pytest.mark.parametrize(("case_id", "transport"), ROWS)
@TELLING_MODES
def test_rows(late_ranks: Ranks, case_id: str, transport: str, mode: str, seed: int) -> None:
    check(late_ranks, case_id, 3, mode, seed, transport)


@GRADIENT_STAGES
def test_stages(late_ranks: Ranks, stage: int) -> None:
    for case_id in ("1-plain-gpt", "2-accumulate-mlp"):
        check(late_ranks, case_id, stage, "lazy", 0, "collective")


def _step(rank: int, world: int, stage: int, clip: bool) -> tuple[dict[str, int], dict[str, int]]:
    model = build("gpt", device.of_rank(rank))
    rg.shard(model, stage=stage, timeout=20.0)
    return counted_step(model, rank, clip)


@EACH_STAGE
def test_the_host_never_waits_in_a_step(late_ranks: Ranks, stage: int) -> None:
    """Four units: root and three blocks. At stage 3 blocks are gathered again in backward, all but the last."""
    gathers = {1: 4, 2: 4, 3: 4 + 3}[stage]
    calls = {"all_gather_single": gathers, "reduce_scatter_single": 4}
    assert late_ranks(WORLD).run(_step, stage, False) == [({}, calls)] * WORLD


@EACH_STAGE
def test_norms_for_clipping_do_not_pass_through_the_host(late_ranks: Ranks, stage: int) -> None:
    """They are one gather more."""
    gathers = {1: 4, 2: 4, 3: 4 + 3}[stage] + 1
    calls = {"all_gather_single": gathers, "reduce_scatter_single": 4}
    assert late_ranks(WORLD).run(_step, stage, True) == [({}, calls)] * WORLD


def _served(rank: int, world: int, stage: int) -> int:
    """Rank 1 has issued gathers to which rank 0 does not come before it has been served."""
    where = device.of_rank(rank)
    model = build("mlp", where)
    engine = rg.shard(model, stage=stage, timeout=60.0)
    spec = SPECS["mlp"]
    x, y = (tensor.to(where) for tensor in spec.batch(rank, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = dist.distributed_c10d._get_default_store()
    with device.use("sides"):
        for _ in range(3):
            spec.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        dist.barrier()
        if rank == 0:
            store.get(f"served at stage {stage}")
        model(x)
        served = 0
        if rank == 1:
            shards = StagedShards(engine._fence, engine.pages.streams)
            for unit in engine.units:
                shard = shards.shard_for(unit.index, engine._fence.stamp(unit))
                served += isinstance(shard, torch.Tensor) and bool(shard.isfinite().all())
            store.set(f"served at stage {stage}", "")
    dist.barrier()
    return served


@EACH_STAGE
def test_a_shard_is_served_while_its_page_is_gathered(late_ranks: Ranks, stage: int) -> None:
    """The thread that serves must not wait for a call: that may wait for the rank that asks."""
    assert late_ranks(WORLD).run(_served, stage, timeout=30.0) == [0, 4]


def _moved(rank: int, world: int, stage: int) -> list[dict[str, int]]:
    """What moves bytes without changing them: in a pass that gathers, and in one that sends what lies in buckets."""
    where = device.of_rank(rank)
    model = build("mlp", where)
    engine = rg.shard(model, stage=stage, timeout=20.0)
    spec = SPECS["mlp"]
    x, y = (tensor.to(where) for tensor in spec.batch(rank, 0))
    found = []
    with device.use("lazy"):
        with torch.no_grad():
            model(x)
        assert device.collectives()["all_gather_single"].count >= len(engine.units)  # the root is used twice
        found.append(device.copies())
        with engine.no_sync():
            spec.loss(model(x), y).backward()
        device.reset_counters()
        assert all(param.grad is not None for param in model.parameters())
        assert device.collectives()["reduce_scatter_single"].count == len(engine.units)
        found.append(device.copies())
    dist.barrier()
    return [{name: tally.count for name, tally in copies.items()} for copies in found]


@EACH_STAGE
def test_calls_read_and_write_in_place(late_ranks: Ranks, stage: int) -> None:
    assert late_ranks(WORLD).run(_moved, stage) == [[{}, {}]] * WORLD


def _reduced_bytes(rank: int, world: int, precision: rg.Precision | None) -> tuple[dict[str, int], int]:
    """Of the reductions of a backward: bytes by the kind of call, and elements of units."""
    where = device.of_rank(rank)
    model = build("gpt", where)
    engine = rg.shard(model, timeout=20.0, precision=precision)
    spec = SPECS["gpt"]
    x, y = (tensor.to(where) for tensor in spec.batch(rank, 0))
    with device.use("lazy"):
        spec.loss(model(x), y).backward()
        calls = device.collectives()
    dist.barrier()
    reduced = {name: tally.bytes for name, tally in calls.items() if name != "all_gather_single"}
    return reduced, sum(unit.layout.padded_numel for unit in engine.units)


@pytest.mark.parametrize(("precision", "size"), ((None, 4), (rg.Precision(reduce="bf16"), 2)))
def test_the_backend_reduces_in_the_dtype_of_the_wire(
    late_ranks: Ranks, precision: rg.Precision | None, size: int
) -> None:
    for reduced, elements in late_ranks(WORLD).run(_reduced_bytes, precision):
        assert reduced == {"reduce_scatter_single": size * elements}


def _default_sums(rank: int, world: int) -> list[bool]:
    """Does the backend add up, where nobody says?"""
    where = device.of_rank(rank)
    square = init_device_mesh(where.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    ways: list[dict[str, Any]] = [{}, {"transport": "one-sided"}, {"mesh": square}]
    return [not rg.shard(build("gpt", where), timeout=20.0, **way).policy.exact for way in ways]


def test_the_backend_adds_up_by_default(late_ranks: Ranks) -> None:
    """Where gradients go by collectives, also of replicas: not one-sidedly."""
    assert late_ranks(WORLD).run(_default_sums) == [[True, False, True]] * WORLD


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
