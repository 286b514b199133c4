"""One rank gives up a backward and another does not: an error at once, or a sum without it, and never half of one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.gradients.strategy import OrderedSum
from retrograde.transport import Key, ThreadRanks
from tests import threads
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.patterns.cells import LIMIT
from tests.small import backward_that_raises, batch, loss_of
from tests.transport.chains import Stop, chains, sharded, stop


def test_what_one_rank_has_added_up_and_given_up() -> None:
    """Rank 0's gradients are there when rank 1 sends its own: rank 1 adds them up, and then gives up. Rank 0 adds up
    nothing before ranks meet, or it would be the first to notice, and say so in other words."""
    models = chains(2)
    sent = threading.Event()
    are_here = OrderedSum._are_here

    def program(ranks: ThreadRanks) -> str:
        model = models[ranks.rank]
        engine = sharded(ranks, model)
        hidden = model[0](torch.ones(2, 4))
        loss = model[1:](hidden).sum()
        try:
            if ranks.rank == 0:
                hidden.register_hook(lambda grad: sent.set())
                loss.backward()
            else:
                hidden.register_hook(stop)
                assert sent.wait(20)
                with pytest.raises(Stop):
                    loss.backward()
            engine.full_grads()
        except rg.DivergenceError as error:
            return str(error)
        return "no error"

    def only_on_rank_1(strategy: OrderedSum, key: Key, ranks: Sequence[int]) -> bool:
        return strategy._transport.rank == 1 and are_here(strategy, key, ranks)

    with mock.patch.object(OrderedSum, "_are_here", only_on_rank_1):
        said = threads.run(2, program)
    for found in said:
        assert "gave up a backward after the gradients of unit 1 had been added up, and rank 0 did not" in found


def test_a_backward_that_raised_just_before_another() -> None:
    """Nothing comes between them at which it could be noticed but the second backward itself."""
    models = chains(2)

    def program(ranks: ThreadRanks) -> dict[str, Tensor | None]:
        model = models[ranks.rank]
        engine = sharded(ranks, model)
        losses = []
        for first in (True, False):
            hidden = model[0](torch.ones(2, 4))
            losses.append(model[1:](hidden).sum())
            if first:
                hidden.register_hook(stop)
        with pytest.raises(Stop):
            losses[0].backward()
        losses[1].backward()
        return engine.full_grads()

    (plain,) = chains(1)
    plain(torch.ones(2, 4)).sum().backward()
    for found in threads.run(2, program):
        for name, param in plain.named_parameters():
            got = found[name]
            assert got is not None and param.grad is not None
            assert got.equal(param.grad), name


# ---- by collectives
def _gives_up_what_a_rank_was_absent_from(rank: int, world: int) -> None:
    """Rank 1 strays before its backward, so it is absent from the calls in which the others bring their gradients."""
    twin = Twin(rank, world, 3, transport="collective", timeout=20.0)
    twin.optimize()
    for _ in range(4):  # the order knows them then
        _complete(twin.model, rank)
        twin.plain_play(_complete)
        twin.step()
        twin.zero_grad()
    if rank == 1:
        with torch.no_grad():
            loss_of(twin.model, batch(rank))
    with mock.patch.object(OrderedSum, "_are_here", lambda *_: False):  # nobody adds up before ranks meet
        if rank == 0:
            with pytest.raises(ZeroDivisionError):
                backward_that_raises(twin.model, batch(rank))  # type: ignore[arg-type]
        else:
            _complete(twin.model, rank)
        twin.engine.full_grads()
    twin.plain_play(lambda model, rank: None if rank == 0 else _complete(model, rank))
    twin.check()
    twin.close()


def _complete(model: nn.Module, rank: int) -> None:
    backward_that_raises(model, batch(rank), raises=False)  # type: ignore[arg-type]


def test_what_a_rank_gives_up_from_which_another_was_absent(ranks: Ranks) -> None:
    ranks(3).run(_gives_up_what_a_rank_was_absent_from, timeout=LIMIT)
