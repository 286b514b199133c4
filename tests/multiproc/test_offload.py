"""Offload where the model computes in the host's memory: taken, said, and nothing moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from tests.harness import Ranks
from tests.small import Small, batch, loss_of
from tests.stages import EACH_STAGE


def _trained(rank: int, world: int, stage: int, offload: str | None) -> tuple[list[torch.Tensor], str]:
    torch.manual_seed(3)
    model = Small()
    engine = rg.shard(model, stage=stage, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    values = [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[operator]
    said = engine.explain()
    dist.barrier()
    return values, said


@EACH_STAGE
@pytest.mark.parametrize("offload", ("optimizer", "parameters"))
def test_nothing_moves_on_the_cpu(ranks: Ranks, stage: int, offload: str) -> None:
    plain = ranks(2).run(_trained, stage, None)
    for (mine, said), (theirs, nothing) in zip(ranks(2).run(_trained, stage, offload), plain, strict=True):
        assert all(map(torch.equal, mine, theirs))
        added = f"offload of {offload}: the model computes in the host's memory, so that there is nothing to move\n"
        assert said == nothing + added


def _refused(rank: int, world: int) -> list[str]:
    said = []
    for offload in ("disk", True, "optimizer" if rank else "parameters"):
        with pytest.raises(rg.ShardingError) as error:
            rg.shard(Small(), offload=offload)  # type: ignore[arg-type]
        said.append(str(error.value))
    dist.barrier()
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    for disk, flag, differing in ranks(2).run(_refused):
        assert 'offload=\'disk\' is not known; give "optimizer", "parameters" or None' in disk
        assert "offload=True is not known" in flag
        assert "offload='parameters' on rank 0, offload='optimizer' on rank 1" in differing
