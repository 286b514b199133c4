"""A rank without any backward that clips and zeroes like the others: it has their gradients then, as they have."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.small import batch, loss_of
from tests.stages import EACH_STAGE

Use = Callable[[nn.Module, torch.optim.Optimizer], object]

USES: dict[str, Use] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "clip_grad_value_": lambda model, optimizer: clip_grad_value_(model.parameters(), 2**-8),
    "a list to clip_grad_value_": lambda model, optimizer: clip_grad_value_(list(model.parameters()), 2**-8),
    "clip_grad_norm_": lambda model, optimizer: clip_grad_norm_(model.parameters(), 2.0**20),
}


def _backwards(busy: list[int], step: int, model: nn.Module, rank: int) -> None:
    """Two on each busy rank but the last, which does one; none on the others."""
    for backward in range(2):
        if rank in busy[: len(busy) - backward]:
            loss_of(model, batch(rank, step)).backward()


def _use(rank: int, world: int, stage: int, name: str, busy: list[int]) -> list[str]:
    """Only the ranks in `busy` do backwards; all ranks use the gradients, step and go on."""
    twin = Twin(rank, world, stage)
    twin.optimize(lambda params: torch.optim.SGD(params, lr=2**-4))
    for step in range(2):
        program = functools.partial(_backwards, busy, step)
        program(twin.model, rank)
        twin.plain_play(program)
        results = [USES[name](model, opt) for model, opt in zip(twin.both, twin.optimizers, strict=True)]
        if name == "clip_grad_norm_":
            # The whole norm from the ranks' parts, not from one tensor: other sums, so a few last places apart.
            torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0.0)
        grads_here = twin.engine.full_grads()
        twin.step()
        for model in twin.both:
            model.zero_grad()
    state = twin.model.state_dict()
    wrong = [n for n, p in twin.plain.named_parameters() if not torch.equal(p, state[n])]
    twin.close()
    return wrong + [n for n, g in grads_here.items() if g is not None and not torch.isfinite(g).all()]


@EACH_STAGE
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


@EACH_STAGE
def test_an_ordinary_loop_does_not_pay_for_it(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_counted, stage) == [[1, 0, 0]] * 2
