"""torch's own wrappers around a sharded model: a parameter that is a piece is not theirs to reduce or to shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg
from tests.harness import Ranks

Wrap = Callable[[nn.Module], object]


class Own(DistributedDataParallel):
    """A trainer's own DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, broadcast_buffers=False)


class Outer(nn.Module):
    """A plain module around the sharded one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(64, 2)


WRAPS: dict[str, tuple[Wrap, str]] = {
    "DDP": (DistributedDataParallel, "DistributedDataParallel"),
    "DDP by keyword": (lambda model: DistributedDataParallel(module=model), "DistributedDataParallel"),
    "a subclass of DDP": (Own, "Own"),
    "DDP around a plain module": (lambda model: DistributedDataParallel(Outer(model)), "DistributedDataParallel"),
    "FSDP": (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), "FullyShardedDataParallel"),
    "fully_shard": (fully_shard, "fully_shard"),
    "fully_shard around a plain module": (lambda model: fully_shard(Outer(model)), "fully_shard"),
}


def _wrapped(rank: int, world: int, name: str) -> str:
    """Pieces of one size on both ranks, so that torch would see nothing wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    rg.shard(model, 3)
    assert all(param.local.numel() == 2048 for param in model.parameters())
    wrap, _ = WRAPS[name]
    with pytest.raises(rg.UnsupportedError) as refused:
        wrap(model)
    model(torch.ones(1, 64)).sum().backward()  # goes on
    dist.barrier()
    return str(refused.value)


@pytest.mark.parametrize("name", WRAPS)
def test_wrapping_a_sharded_model_is_refused(ranks: Ranks, name: str) -> None:
    for rank, said in enumerate(ranks(2).run(_wrapped, name)):
        assert said.startswith(f"rank {rank}: {WRAPS[name][1]} around parameter 0.weight")
        assert (
            "call the sharded model itself" in said and "accelerator.prepare_model(model, evaluation_mode=True)" in said
        )


def _replicated(rank: int, world: int) -> str:
    """torch's `replicate` makes its DDP at the first forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    rg.shard(model, 3)
    with pytest.raises(rg.UnsupportedError) as refused:
        replicate(model)(torch.ones(1, 64))
    dist.barrier()
    return str(refused.value)


def test_replicating_a_sharded_model_is_refused(ranks: Ranks) -> None:
    assert all("DistributedDataParallel around parameter 0.weight" in said for said in ranks(2).run(_replicated))


def _plain(rank: int, world: int) -> bool:
    """A plain model beside a sharded one is torch's business."""
    rg.shard(nn.Linear(4, 4), 3)
    plain = DistributedDataParallel(nn.Linear(4, 4))
    plain(torch.ones(1, 4)).sum().backward()
    return all(param.grad is not None for param in plain.parameters())


def test_a_plain_model_may_be_wrapped(ranks: Ranks) -> None:
    assert all(ranks(2).run(_plain))


def _the_other_way_round(rank: int, world: int) -> list[str]:
    said = []
    wrapped = [DistributedDataParallel(nn.Linear(4, 4)), Outer(DistributedDataParallel(nn.Linear(4, 4)))]
    wrapped.append(fully_shard(nn.Sequential(nn.Linear(4, 4))))
    for model in wrapped:
        with pytest.raises(rg.ShardingError) as refused:
            rg.shard(model, 3)
        said.append(str(refused.value))
    return said


def test_sharding_a_wrapped_model_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(_the_other_way_round):
        assert "module (root) is a DistributedDataParallel" in said[0] and "as in model.module" in said[0]
        assert "module inner is a DistributedDataParallel" in said[1] and "as in model.inner.module" in said[1]
        assert "parameter weight of module 0 (Linear) is a DTensor" in said[2]
