"""Weights that do not lie row by row in memory (channels_last, transposed) keep their strides."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.files import through_a_file
from tests.multiproc.pictures import Pictures, batch, pictures
from tests.reference import play, same
from tests.stages import EACH_STAGE


def strides(model: nn.Module) -> dict[str, Any]:
    return {name: value.stride() for name, value in model.state_dict().items()}


def _backward(step: int, model: nn.Module, rank: int) -> None:
    model(batch(rank, step)).pow(2).sum().backward()


def _trained(rank: int, world: int, stage: int) -> None:
    plain, model = pictures(), pictures()
    assert not plain.first.weight.is_contiguous() and plain.point.weight.stride() == (8, 1, 8, 8)
    engine = rg.shard(model, stage)
    assert strides(model) == strides(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=2**-4, momentum=0.5) for each in (plain, model)]
    for step in range(3):
        play(plain, world, functools.partial(_backward, step), stage)
        out = model(batch(rank, step))
        assert torch.equal(out, plain(batch(rank, step)))
        out.pow(2).sum().backward()
        full = engine.full_grads()
        assert all(same(full[name], param.grad) for name, param in plain.named_parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert strides(model) == strides(plain)
    dist.barrier()


@pytest.mark.parametrize("world", (1, 2, 3))  # by 3 a mean is rounded, and no layer is cut evenly
@EACH_STAGE
def test_training_is_exact(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_trained, stage)


def _edited(rank: int, world: int, stage: int) -> None:
    """Rows, masks, random numbers, whole tensors, loading: all where torch has them."""
    plain, model = pictures(), pictures()
    rg.shard(model, stage)
    seen: list[list[Tensor]] = []
    for each in (plain, model):
        weight = dict(each.named_parameters())["first.weight"]
        with torch.no_grad():
            weight[0] = 0.5
            weight.mul_(torch.arange(3.0).view(1, 3, 1, 1))
            weight.data[1].fill_(2.0)
            each.first.weight[2, 1] = 3.0
            each.get_parameter("matrix").data = torch.arange(30.0).view(6, 5)
            torch.manual_seed(5)
            nn.init.normal_(each.get_parameter("point.weight"))
            nn.init.kaiming_uniform_(each.blocks[0][0].weight)
            each.blocks[1].load_state_dict(each.blocks[0].state_dict())
        each(batch(0)).pow(2).sum().backward()
        grad = weight.grad
        found = [grad[0].sum(), grad.flatten()[:7].norm(), grad.sum((0, 2, 3)).max(), (grad * weight.detach()).sum()]
        grad[:, 1] = 0.25
        seen.append([*found, grad.norm(), grad.mean((2, 3))[3, 1]])
    assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(*seen, strict=True)), seen
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    dist.barrier()


@EACH_STAGE
def test_edits(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_edited, stage)


def _flat(rank: int, world: int) -> bool:
    plain, model = pictures(), pictures()
    rg.shard(model, 3)
    found = dict(model.named_parameters())["first.weight"].detach().flatten().topk(3)
    wanted = plain.first.weight.detach().flatten().topk(3)
    dist.barrier()
    return torch.equal(found.values, wanted.values) and torch.equal(found.indices, wanted.indices)


def test_flat_views_are_in_torchs_order(ranks: Ranks) -> None:
    assert ranks(2).run(_flat) == [True, True]


def _from_meta(rank: int, world: int) -> None:
    plain, model = pictures(), pictures("meta")
    model.matrix = nn.Parameter(torch.randn(6, 5))
    model.matrix.data.copy_(plain.matrix)
    rg.shard(model, 3)
    wanted = strides(plain) | {"matrix": (5, 1)}
    assert strides(model) == wanted
    dist.barrier()


def test_models_on_meta(ranks: Ranks) -> None:
    ranks(2).run(_from_meta)


def _huge(rank: int, world: int) -> None:
    """A gradient that is sent from where autograd left it."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(128, 1024, 3, bias=False).to(memory_format=torch.channels_last)

    plain, model = make(), make()
    engine = rg.shard(model, 3)
    x = torch.randn(1, 128, 3, 3, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    for each in (plain, model):
        each(x).sum().backward()
    assert plain.weight.grad.nbytes >= 2**22
    assert torch.equal(engine.full_grad("weight"), plain.weight.grad)
    dist.barrier()


def test_huge_gradients(ranks: Ranks) -> None:
    ranks(2).run(_huge)


def _states(rank: int, world: int) -> str:
    """An optimizer's state is for elements in the order in which they lie in memory."""
    model, other = pictures(), pictures().to(memory_format=torch.contiguous_format)
    for each in (model, other):
        rg.shard(each, 3)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model, other)]
    model(batch(rank)).sum().backward()
    optimizers[0].step()
    state = through_a_file(optimizers[0].state_dict())
    optimizers[0].load_state_dict(state)
    plain = pictures()
    optimizer = torch.optim.Adam(plain.parameters())
    plain(batch(0)).sum().backward()
    optimizer.step()
    optimizers[0].load_state_dict(optimizer.state_dict())
    piece = optimizers[0].state[model.get_parameter("first.weight")]["exp_avg"]
    wanted = model.get_parameter("first.weight").cut(optimizer.state[plain.first.weight]["exp_avg"])
    assert torch.equal(piece.local, wanted)
    dist.barrier()
    with pytest.raises(rg.StateError) as refused:
        optimizers[1].load_state_dict(state)
    return str(refused.value)


def test_states_of_optimizers(ranks: Ranks) -> None:
    for said in ranks(2).run(_states):
        assert "first.weight" in said and "memory" in said


def _converted(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model = Pictures()
    rg.shard(model, 3)
    with pytest.raises(rg.UnsupportedError) as refused:
        model.to(memory_format=torch.channels_last)
    model.to(torch.float32)
    assert model.first.weight.is_contiguous()
    return [str(refused.value)]


def test_converting_after_sharding_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(_converted):
        assert "parameter first.weight is sharded" in said[0] and "memory_format" in said[0]
        assert "before rg.shard()" in said[0]


def _different(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    if rank == 1:
        model = model.to(memory_format=torch.channels_last)
    with pytest.raises(rg.ShardingError) as refused:
        rg.shard(model, 3)
    return str(refused.value)


def test_ranks_with_different_strides(ranks: Ranks) -> None:
    assert all("weight[4, 3, 3, 3]" in said and "strides" in said for said in ranks(2).run(_different))
