"""A rank without any backward that clips and zeroes like the others: it has their gradients then, as they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.harness import RankPool
from tests.multiproc.twin import Twin
from tests.small import batch, loss_of

Ranks = Callable[[int], RankPool]
Use = Callable[[nn.Module, torch.optim.Optimizer], object]

USES: dict[str, Use] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "clip_grad_value_": lambda model, optimizer: clip_grad_value_(model.parameters(), 2**-8),
    "a list to clip_grad_value_": lambda model, optimizer: clip_grad_value_(list(model.parameters()), 2**-8),
    "clip_grad_norm_": lambda model, optimizer: clip_grad_norm_(model.parameters(), 2.0**20),
}


def _use(rank: int, world: int, stage: int, name: str, busy: list[int]) -> list[str]:
    """Only the ranks in `busy` do backwards; all ranks use the gradients, step and go on."""
    twin = Twin(rank, world, stage)
    twin.optimize(lambda params: torch.optim.SGD(params, lr=2**-4))
    for step in range(2):
        for backward in range(2):
            # Each rank's second backward, too: some do fewer than others.
            here = busy[: len(busy) - backward]
            if rank in here:
                loss_of(twin.model, batch(rank, step)).backward()
            by_rank = [loss_of(twin.plain, batch(r, step)) if r in here else None for r in range(world)]
            params = list(twin.plain.parameters())
            grads = [torch.autograd.grad(loss, params) for loss in by_rank if loss is not None]
            for index, param in enumerate(params):
                total = sum(each[index] for each in grads) / world if grads else None
                if total is not None:
                    param.grad = total if param.grad is None else param.grad + total
        results = [USES[name](model, opt) for model, opt in zip(twin.both, twin.optimizers, strict=True)]
        if name == "clip_grad_norm_":
            # The whole norm from the ranks' parts, not from one tensor: other sums, so a few last places apart.
            torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0.0)
        grads_here = twin.engine.full_grads()
        twin.step()
        for model in twin.both:
            model.zero_grad()
    wrong = [n for n, p in twin.plain.named_parameters() if not close(p, twin.model.state_dict()[n], stage)]
    twin.close()
    return wrong + [n for n, g in grads_here.items() if g is not None and not torch.isfinite(g).all()]


def close(one: torch.Tensor, other: torch.Tensor, stage: int) -> bool:
    """Stage 1 adds up each rank's backwards before it adds the ranks', so the last bits may differ there."""
    return torch.allclose(one, other, rtol=1e-6, atol=1e-8) if stage == 1 else torch.equal(one, other)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("name", USES)
def test_one_rank_is_idle(ranks: Ranks, name: str, stage: int) -> None:
    assert ranks(2).run(_use, stage, name, [0]) == [[], []]


@pytest.mark.parametrize("name", USES)
def test_some_ranks_are_idle(ranks: Ranks, name: str) -> None:
    assert ranks(4).run(_use, 2, name, [1, 3]) == [[]] * 4


@pytest.mark.parametrize("name", [name for name in USES if "value" not in name])  # which torch refuses without any
def test_all_ranks_are_idle(ranks: Ranks, name: str) -> None:
    assert ranks(2).run(_use, 3, name, []) == [[], []]


def _counted(rank: int, world: int, stage: int) -> list[int]:
    """Meetings of an ordinary loop, zeroing at its top: from its second step on nothing is asked at `zero_grad()`."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    optimizer = twin.optimizers[1]
    counts = []
    for step in range(3):
        before = twin.engine.ledger.count("agree")
        optimizer.zero_grad()
        counts.append(twin.engine.ledger.count("agree") - before)
        loss_of(twin.model, batch(rank, step)).backward()
        optimizer.step()
    twin.close()
    return counts


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_an_ordinary_loop_does_not_pay_for_it(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_counted, stage) == [[1, 0, 0]] * 2
