"""Replicas of a sharded model on the device, 2 of 2 shards: exact and default sums, without a race, without a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.transport.collective import CollectiveTransport
from retrograde.transport.collective.courtesy import is_absent, spread_absence
from tests.accelerator import device
from tests.accelerator.matrix import play_late
from tests.accelerator.ranks import TELLING_MODES, alone
from tests.accelerator.training import build as build_spec
from tests.accelerator.training import counted_step, on_device
from tests.harness import Ranks
from tests.meshes import mesh_of
from tests.multiproc.replicas import REPLICAS, TIMEOUT, WORLD, MeshTwin
from tests.patterns.cells import LIMIT
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.reference import Program
from tests.small import backwards, build
from tests.stages import EACH_STAGE, REDUCING_STAGES
from tests.transport.strays import STRAYS

EXACT = pytest.mark.parametrize("exact", (True, False))
ROWS = ("11f-replicated-mlp", "11f-replicated_unequal_backwards-mlp", "11f-replicated_changing_units-mlp")


def _twin(rank: int, world: int, stage: int, exact: bool | None, where: torch.device) -> MeshTwin:
    twin = MeshTwin(rank, world, stage, make=lambda: device.move(build(), where), exact=exact)
    assert isinstance(twin.engine.transport, CollectiveTransport)
    return twin


def _equal_replicas(twin: MeshTwin) -> bool:
    """Bit for bit: what each rank holds of the model, and of gradients."""
    held = [unit.shard for unit in twin.engine.units]
    held += [p.grad.local.reshape(-1) for p in twin.model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    everybody: list[Any] = [None] * twin.world
    dist.all_gather_object(everybody, torch.cat(held).cpu())
    return torch.equal(everybody[twin.rank], everybody[(twin.rank + 2) % 4])


def _check_close(twin: MeshTwin) -> None:
    """The backend adds up in an order of its own."""
    grads = twin.engine.full_grads()
    for name, plain in twin.plain.named_parameters():
        found = grads[name]
        assert found is not None
        assert plain.grad is not None
        torch.testing.assert_close(found, plain.grad, rtol=1e-5, atol=1e-7)


def _play(twin: MeshTwin, *programs: Program) -> None:
    """One after the other, on both models."""

    def all_of_them(model: nn.Module, rank: int) -> None:
        for program in programs:
            program(model, rank)

    all_of_them(twin.model, twin.rank)
    twin.plain_play(all_of_them)


# ---- training
def _training(rank: int, world: int, stage: int, exact: bool, mode: str, seed: int) -> bool:
    with on_device(rank, mode, seed) as where:
        twin = _twin(rank, world, stage, exact, where)
        twin.optimize()
        for _ in range(2):
            _play(twin, STRAYS["skips a unit"].always, STRAYS["one backward fewer"].always)
            twin.check_grads() if exact else _check_close(twin)
            twin.step()
            twin.zero_grad()
        return _equal_replicas(twin)


@EXACT
@EACH_STAGE
def test_training(late_ranks: Ranks, stage: int, exact: bool) -> None:
    assert late_ranks(WORLD).run(_training, stage, exact, "lazy", 0, timeout=LIMIT) == [True] * WORLD


@EXACT
@TELLING_MODES
def test_in_every_order(late_ranks: Ranks, exact: bool, mode: str, seed: int) -> None:
    assert late_ranks(WORLD).run(_training, 3, exact, mode, seed, timeout=LIMIT) == [True] * WORLD


@pytest.mark.parametrize("case_id", ROWS)
def test_rows(late_ranks: Ranks, case_id: str) -> None:
    """By the default transport, exactly."""
    got = late_ranks(WORLD).run(play_late, case_id, 3, "lazy", 0, timeout=LIMIT, exact=True)
    want = expected(case_id, WORLD, 3)
    for rank in range(WORLD):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


# ---- counts
def _step(rank: int, world: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    model = build_spec("gpt", device.of_rank(rank))
    rg.shard(model, stage=stage, mesh=mesh_of(REPLICAS, world), timeout=TIMEOUT)
    return counted_step(model, rank)


@EACH_STAGE
def test_the_host_never_waits_in_a_step(late_ranks: Ranks, stage: int) -> None:
    """Four units: root and three blocks. At stage 3 blocks are gathered again in backward, all but the last."""
    gathers = {1: 4, 2: 4, 3: 4 + 3}[stage]
    calls = {"all_gather_single": gathers, "reduce_scatter_single": 4, "all_reduce": 4}
    assert late_ranks(WORLD).run(_step, stage) == [({}, calls)] * WORLD


# ---- strays
def _absence() -> None:
    """What a sum makes of an absent part is another nan than what is absent, but in fp32 by chance."""
    for dtype in (torch.float32, torch.bfloat16):
        with device.use("lazy"):
            absent = torch.empty(3, dtype=dtype, device="late")
            absent.view(torch.uint8).fill_(255)
            present, total = torch.ones(3, dtype=dtype, device="late"), torch.full((3,), 2, dtype=dtype, device="late")
            spread_absence(torch.cat([present, present]), 2, total)
            first = total.clone()
            spread_absence(torch.cat([present, absent]), 2, total)
            assert device.synchronisations() == {}
        assert first.tolist() == [2, 2, 2]
        assert is_absent(total.cpu())


def test_of_absent_parts_there_is_no_sum(late_ranks: Ranks) -> None:
    """And the host does not look."""
    late_ranks(1).run(alone, _absence)


def _with_a_stray(
    rank: int, world: int, stage: int, kind: str, exact: bool, mode: str, seed: int, hooked: bool = False
) -> list[bool]:
    """Are replicas equal after each step? One of the steps has a stray, between backwards in which nobody strays."""
    found = []
    with on_device(rank, mode, seed) as where:
        twin = _twin(rank, world, stage, exact, where)
        twin.optimize()
        if hooked:
            leaf = twin.model.get_parameter("blocks.2.up.weight")
            leaf.register_post_accumulate_grad_hook(lambda leaf: None)
        for step in range(4):
            always, once = STRAYS[kind]
            _play(twin, always, once if step == 2 else always, always)
            twin.check_grads() if exact else _check_close(twin)
            twin.optimizers[1].step()
            found.append(_equal_replicas(twin))
            twin.optimizers[0].step()
            _follow(twin)
            twin.zero_grad()
    return found


def _follow(twin: MeshTwin) -> None:
    """Sums that the backend adds up would lead the two models apart, a little in each step."""
    state = twin.model.state_dict()
    with torch.no_grad():
        for name, param in twin.plain.named_parameters():
            torch.testing.assert_close(state[name], param, rtol=1e-5, atol=1e-6)
            param.copy_(state[name])


@pytest.mark.parametrize("kind", STRAYS)
@EXACT
@REDUCING_STAGES
def test_strays(late_ranks: Ranks, stage: int, exact: bool, kind: str) -> None:
    assert late_ranks(WORLD).run(_with_a_stray, stage, kind, exact, "lazy", 0, timeout=LIMIT) == [[True] * 4] * WORLD


def _one_fewer_on_odd_ranks(model: nn.Module, rank: int) -> None:
    backwards(*range(1 if rank % 2 else 2))(model, rank)


def _fewer_in_each(rank: int, world: int, exact: bool) -> bool:
    """Of each replica a rank does not come to a backward, in which there is nothing to gather: nobody's first call of
    two ends by itself."""
    with on_device(rank, "lazy", 0) as where:
        twin = _twin(rank, world, 2, exact, where)
        twin.optimize()
        for step in range(4):
            _play(twin, _one_fewer_on_odd_ranks if step == 2 else backwards(0, 1))
            twin.optimizers[1].step()
            twin.optimizers[0].step()
            _follow(twin)
            twin.zero_grad()
        return _equal_replicas(twin)


@EXACT
def test_a_stray_in_each_replica(late_ranks: Ranks, exact: bool) -> None:
    assert late_ranks(WORLD).run(_fewer_in_each, exact, timeout=LIMIT) == [True] * WORLD


@EXACT
@TELLING_MODES
def test_strays_in_every_order(late_ranks: Ranks, exact: bool, mode: str, seed: int) -> None:
    found = late_ranks(WORLD).run(_with_a_stray, 3, "takes another order", exact, mode, seed, timeout=LIMIT)
    assert found == [[True] * 4] * WORLD


@pytest.mark.parametrize("kind", STRAYS)
def test_strays_with_hooks(late_ranks: Ranks, kind: str) -> None:
    """Ranks meet at the end of a backward for what a hook sees; what else is late waits for other meetings."""
    found = late_ranks(WORLD).run(_with_a_stray, 3, kind, False, "lazy", 0, True, timeout=LIMIT)
    assert found == [[True] * 4] * WORLD
