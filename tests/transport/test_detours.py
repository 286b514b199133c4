"""A rank evaluates for so long that it invites the others, which are at a boundary: nobody passes that without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from retrograde.transport.order import OrderPolicy
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.patterns.cells import LIMIT
from tests.small import BLOCKS, batch, loss_of
from tests.stages import WITH_OTHERS

EVALUATIONS = 20


def _evaluate(model: nn.Module) -> set[float]:
    with torch.no_grad():
        return {loss_of(model, batch(7)).item() for _ in range(EVALUATIONS)}


def _edit(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _others_wait(rank: int, world: int, place: str) -> set[float]:
    """Rank 1 evaluates before a step for which no gradient is under way any more, or between a step and an edit."""
    twin = Twin(rank, world, 3, transport="collective", timeout=20.0)
    twin.optimize()
    for step in range(4):
        twin.train(step)
    if place == "a step":
        twin.backward(4)
        for model in twin.both:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # ranks meet for the norm
    losses = _evaluate(twin.model) if rank == 1 else set()
    if place == "an edit":
        for model in twin.both:
            _edit(model)
    twin.step()
    twin.check()
    twin.zero_grad()
    twin.train(5)
    twin.check()
    twin.close()
    return losses


@pytest.mark.parametrize("place", ("a step", "an edit"))
@WITH_OTHERS
def test_ranks_at_a_boundary_wait_for_one_on_a_detour(ranks: Ranks, world: int, place: str) -> None:
    assert OrderPolicy().soften_after < EVALUATIONS * (BLOCKS + 1)
    first, second, *_ = ranks(world).run(_others_wait, place, timeout=LIMIT)
    assert (len(first), len(second)) == (0, 1)
