"""Pages in another dtype than the masters, against plain torch: a bf16 model that computes, fp32 masters that train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import retrograde as rg
from tests.harness import RankPool
from tests.multiproc.precise import FULL, PreciseTwin
from tests.stages import EACH_STAGE, EACH_WORLD, REDUCING_STAGES

Ranks = Callable[[int], RankPool]

NORMS = rg.Precision(param="bf16", keep=nn.LayerNorm)
PRECISIONS = {
    "bf16": "bf16",
    "fp16": "fp16",
    "wide sums": FULL,
    "narrow wire": rg.Precision(param="bf16", reduce="fp16"),
    "norms in fp32": NORMS,
    "double masters": rg.Precision(param="fp32", master=torch.float64),
}


def _trained(rank: int, world: int, stage: int, name: str) -> list[str]:
    """Several steps with two backwards, windows, and gradients that are kept over a step."""
    twin = PreciseTwin(rank, world, stage, PRECISIONS[name])
    twin.optimize(lambda params: torch.optim.AdamW(params, lr=2**-6))
    for step in range(3):
        twin.backward(step)
        twin.check_grads()
        twin.backward(10 + step, 20 + step)
        twin.check_grads()
        torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.5)
        _clip_plainly(twin.plain, 0.5)
        twin.check_grads()
        twin.step()
        twin.check()
        twin.zero_grad()
    twin.close()
    return sorted({str(param.dtype) for param in twin.model.parameters()})


def _clip_plainly(model: nn.Module, most: float) -> None:
    """As torch does, with the norm of each gradient computed in double precision and rounded once."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norms = torch.stack([grad.double().norm() for grad in grads]).to(grads[0].dtype)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, torch.nn.utils.get_total_norm([norms]))


@EACH_WORLD
@EACH_STAGE
@pytest.mark.parametrize("name", PRECISIONS)
def test_training(ranks: Ranks, stage: int, world: int, name: str) -> None:
    wanted = ["torch.float64"] if name == "double masters" else ["torch.float32"]
    assert ranks(world).run(_trained, stage, name) == [wanted] * world


def _by_collectives(rank: int, world: int, stage: int, name: str) -> None:
    """`exact=False`, which in the host's memory gives the same bits."""
    twin = PreciseTwin(rank, world, stage, PRECISIONS[name], exact=False)
    twin.backward(0)
    twin.check_grads()
    twin.backward(1, 2)
    twin.check_grads()
    twin.close()


@REDUCING_STAGES
@pytest.mark.parametrize("name", ("bf16", "wide sums"))
def test_sums_by_collectives(ranks: Ranks, stage: int, name: str) -> None:
    ranks(2).run(_by_collectives, stage, name)
