"""Replicas of a sharded model on a mesh of two dimensions, (replicate, shard): 2 replicas of 2 shards, as processes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import retrograde as rg
from retrograde.transport.groups import group_of_replicas
from tests.harness import RankError, Ranks
from tests.meshes import mesh_of
from tests.multiproc.replicas import DIFFERENT, REPLICAS, TIMEOUT, WORLD, MeshTwin
from tests.small import Small, batch, build, loss_of
from tests.stages import EACH_STAGE, PAGE_STAGES
from tests.transport.delays import delayed


# ---- training
def _training(rank: int, world: int, stage: int, delay: bool) -> dict[str, Any]:
    """Several backwards over one graph, windows, clipping by value, steps."""
    twin = MeshTwin(rank, world, stage)
    twin.optimize()

    def several(step: int, model: nn.Module, rank: int) -> None:
        loss = loss_of(model, batch(rank, step))
        loss.backward(retain_graph=True)
        loss_of(model, batch(rank, step + 10)).backward()
        loss.backward()

    with delayed(rank, chance=0.2) if delay else contextlib.nullcontext():
        for step in range(2):
            several(step, twin.model, rank)
            twin.plain_play(partial(several, step))
            twin.check_grads()
            for model in twin.both:
                torch.nn.utils.clip_grad_value_(model.parameters(), 2**-6)
            twin.step()
            twin.zero_grad()
            with twin.engine.coalesce():
                loss_of(twin.model, batch(rank, step + 20)).backward()
            twin.plain_backward(step + 20)
            twin.check_grads()
            twin.step()
            twin.zero_grad()
    twin.check_weights()
    twin.compare_replicas()
    twin.close()
    shards = sum(unit.layout.shard_bytes for unit in twin.engine.units)
    pages = sum(unit.layout.page_bytes for unit in twin.engine.units)
    return {"shards": shards, "pages": pages, "explained": twin.engine.explain()}


@pytest.mark.parametrize("delay", (False, True))
@EACH_STAGE
def test_training_is_exact(ranks: Ranks, stage: int, delay: bool) -> None:
    for told in ranks(WORLD).run(_training, stage, delay, timeout=120.0):
        assert told["pages"] == 2 * told["shards"]
        assert "4 rank(s), 2 replicas of 2 shard(s)" in told["explained"]


def _no_sync(rank: int, world: int, stage: int) -> None:
    twin = MeshTwin(rank, world, stage)
    twin.optimize()
    with twin.engine.no_sync():
        loss_of(twin.model, batch(rank, 0)).backward()
        loss_of(twin.model, batch(rank, 1)).backward()
    loss_of(twin.model, batch(rank, 2)).backward()

    def added_up(model: nn.Module, rank: int) -> None:
        torch.autograd.backward([sum_of(model, rank)])

    def sum_of(model: nn.Module, rank: int) -> Tensor:
        grads: dict[nn.Parameter, Tensor] = {}
        for step in range(3):
            found = torch.autograd.grad(loss_of(model, batch(rank, step)), list(model.parameters()))
            for param, grad in zip(model.parameters(), found, strict=True):
                grads[param] = grads[param] + grad if param in grads else grad
        return sum((param * grad).sum() for param, grad in grads.items())

    twin.plain_play(added_up)
    twin.check_grads()
    twin.step()
    twin.check_weights()
    twin.close()


@EACH_STAGE
def test_no_sync(ranks: Ranks, stage: int) -> None:
    ranks(WORLD).run(_no_sync, stage)


# ---- ranks that differ
def _differing(rank: int, world: int, stage: int, name: str) -> None:
    MeshTwin(rank, world, stage).differ(name, steps=2)


@pytest.mark.parametrize("name", DIFFERENT)
@EACH_STAGE
def test_ranks_that_differ(ranks: Ranks, stage: int, name: str) -> None:
    ranks(WORLD).run(_differing, stage, name)


def _captured(rank: int, world: int, stage: int) -> None:
    """`autograd.grad` returns pieces of the mean, also where .grad has something."""
    twin = MeshTwin(rank, world, stage)
    twin.backward(0)
    name = "blocks.1.down.weight"
    leaf = twin.model.get_parameter(name)
    (found,) = torch.autograd.grad(loss_of(twin.model, batch(rank, 1)), [leaf])
    grads = [
        torch.autograd.grad(loss_of(twin.plain, batch(r, 1)), [twin.plain.get_parameter(name)])[0] for r in range(4)
    ]
    want = ((grads[0] + grads[1]) + (grads[2] + grads[3])) / 4
    assert torch.equal(found.as_subclass(Tensor).reshape(-1), leaf.cut(want))
    twin.check_grads()
    twin.close()


@PAGE_STAGES
def test_autograd_grad(ranks: Ranks, stage: int) -> None:
    ranks(WORLD).run(_captured, stage)


# ---- the whole model
def _state(rank: int, world: int, stage: int) -> None:
    """Saved, loaded, edited: all ranks have all of it."""
    twin = MeshTwin(rank, world, stage)
    twin.optimize()
    twin.train(0)
    state = twin.model.state_dict()
    twin.check_weights()
    for model in twin.both:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    twin.check_weights()
    twin.model.load_state_dict(state)
    twin.plain.load_state_dict(state)
    twin.train(1)
    twin.check_weights()
    with twin.engine.full_params() as full:
        assert all(torch.equal(full[name], param) for name, param in twin.plain.named_parameters())
    twin.compare_replicas()
    twin.close()


@EACH_STAGE
def test_state(ranks: Ranks, stage: int) -> None:
    ranks(WORLD).run(_state, stage)


def _clipped(rank: int, world: int, stage: int) -> tuple[float, float]:
    twin = MeshTwin(rank, world, stage)
    twin.backward(0)
    norm = float(twin.engine.clip_grad_norm_(0.125))
    plain = float(torch.nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.125))
    twin.close()
    return norm, plain


@EACH_STAGE
def test_clipping(ranks: Ranks, stage: int) -> None:
    """The norm of the model, not of its replicas together; added up in another order than torch's."""
    norms = ranks(WORLD).run(_clipped, stage)
    assert len({norm for norm, _ in norms}) == 1
    assert norms[0][0] == pytest.approx(norms[0][1], rel=2e-6)


def _grown(rank: int, world: int) -> None:
    """A head that came later: rank 0's values are everybody's."""
    twin = MeshTwin(rank, world, 3)
    twin.backward(0)
    torch.manual_seed(rank)
    twin.model.head = nn.Linear(12, 17)
    loss_of(twin.model, batch(rank)).backward()
    twin.compare_replicas()
    twin.close()


def test_parameters_that_come_later(ranks: Ranks) -> None:
    ranks(WORLD).run(_grown)


def _from_meta(rank: int, world: int, stage: int) -> None:
    """Ranks whose seeds differ: each shard has one value all the same."""
    with torch.device("meta"):
        model = Small()
    torch.manual_seed(rank)
    engine = rg.shard(model, stage, mesh=mesh_of(REPLICAS, world))
    mine = torch.cat([unit.shard for unit in engine.units])
    everybody = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everybody, mine)
    assert torch.equal(everybody[0], everybody[2]) and torch.equal(everybody[1], everybody[3])
    dist.barrier()


@PAGE_STAGES
def test_a_model_on_the_meta_device(ranks: Ranks, stage: int) -> None:
    ranks(WORLD).run(_from_meta, stage)


# ---- meshes
def _crossed(rank: int, world: int) -> None:
    """Replicas need not be neighbours: the order of sums is that of the mesh."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp_replicate", "dp_shard"))
    model, plain = build(), build()
    engine = rg.shard(model, mesh=mesh)
    loss_of(model, batch(rank)).backward()
    grads = [torch.autograd.grad(loss_of(plain, batch(r)), list(plain.parameters())) for r in range(4)]
    got = engine.full_grads()
    for (name, _), a, b, c, d in zip(plain.named_parameters(), *grads, strict=True):
        assert torch.equal(got[name], ((a + c) + (b + d)) / 4), name
    dist.barrier()


def _part_of_the_world(rank: int, world: int) -> None:
    """Two dimensions of three: of 4 ranks two pairs, each with a model of its own, of two replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    for _ in range(2):  # the second engine of the same ranks
        model = build()
        engine = rg.shard(model, mesh=mesh["dp_replicate", "dp_shard"], timeout=TIMEOUT)
        loss_of(model, batch(rank)).backward()
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        plain = build()
        grads = [torch.autograd.grad(loss_of(plain, batch(r)), [plain.head.bias])[0] for r in pair]
        assert torch.equal(engine.full_grad("head.bias"), (grads[0] + grads[1]) / 2)
        assert engine.transport.world == 2
    dist.barrier()


@pytest.mark.parametrize("program", (_crossed, _part_of_the_world))
def test_meshes(ranks: Ranks, program: Callable[..., None]) -> None:
    ranks(WORLD).run(program)


def _refused(act: Callable[[], object], *words: str) -> None:
    with pytest.raises(rg.ShardingError) as caught:
        act()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def _bad_meshes(rank: int, world: int) -> None:
    model = build()
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
    _refused(lambda: rg.shard(model, mesh=three), "mesh has dimensions ('pp', 'replicate', 'shard')", "two of them")
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    _refused(lambda: rg.shard(model, mesh=turned), "('shard', 'replicate'), not (replicate, shard)", "in this order")
    elsewhere = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))
    if rank > 1:
        _refused(lambda: rg.shard(model, mesh=elsewhere), "mesh has ranks [[0, 1]]", f"not rank {rank}")
    dist.barrier()
    square = mesh_of(REPLICAS, world)
    mine = square if rank else None
    _refused(lambda: rg.shard(model, mesh=mine), "mesh=[[0, 1, 2, 3]] on rank 0, mesh=[[0, 1], [2, 3]] on rank 1")
    dist.barrier()


def test_meshes_that_cannot_be_used(ranks: Ranks) -> None:
    ranks(WORLD).run(_bad_meshes)


# ---- failures
def _dies(rank: int, world: int) -> str:
    """Rank 3, of the second replica, in its second step."""
    model = build()
    rg.shard(model, mesh=mesh_of(REPLICAS, world), timeout=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
    try:
        for step in range(2):
            loss_of(model, batch(rank, step)).backward()
            if rank == 3 and step == 1:
                os._exit(7)
            optimizer.step()
    except rg.DivergenceError as error:
        raise AssertionError(f"told: {error}") from error
    return "nothing"


def test_a_dead_rank_is_named_in_all_replicas(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(WORLD).run(_dies)
    for rank in range(3):
        assert re.search(r"told: .*rank 3", caught.value.failures[rank]), caught.value.failures[rank]


def _raises(rank: int, world: int, at: int) -> str:
    """One rank cannot be reconciled: its error is everybody's, in both replicas."""
    model = build()
    engine = rg.shard(model, mesh=mesh_of(REPLICAS, world), timeout=TIMEOUT)
    loss_of(model, batch(rank)).backward()
    ask = partial(engine.full_grad, "head.bias" if rank != at else "head.weight")
    with pytest.raises(rg.DivergenceError) as caught:
        ask()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("at", (0, 3))
def test_who_diverges_is_named_in_all_replicas(ranks: Ranks, at: int) -> None:
    for told in ranks(WORLD).run(_raises, at):
        assert f"rank {at} is at a value over all ranks (the gradient of head.weight)" in told


# ---- a mesh with another backend than the default group's
def _second(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _of_another_backend(rank: int, world: int) -> tuple[list[str], bool]:
    """The backends of the groups over which a mesh's replicas go, with and without an override; and are the ranks'
    gradients equal that they have added up?"""
    if not hasattr(dist.Backend, "SECOND"):
        dist.Backend.register_backend("second", _second, devices=["cpu"])
    found, sums = [], []
    for override in (None, {"replicate": "second", "shard": "second"}):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"), backend_override=override)
        group = group_of_replicas(mesh, "mesh", rg.ShardingError)
        found.append(dist.get_backend_config(group))
        model = build()
        engine = rg.shard(model, 2, mesh=mesh, transport="collective", timeout=TIMEOUT)
        loss_of(model, batch(rank)).backward()
        sums.append(engine.full_grad("head.weight"))
        assert group is dist.group.WORLD or override is not None
        dist.barrier()
    return found, torch.equal(*sums)


def test_replicas_go_by_the_backend_of_their_mesh(ranks: Ranks) -> None:
    for found, same in ranks(2).run(_of_another_backend):
        assert "second" not in found[0] and found[1] == "cpu:second"
        assert same
