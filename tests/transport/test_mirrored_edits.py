"""Edits where other ranks' shards show in pages: each rank makes them once, and nobody sees those of another."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import Ranks
from tests.reference import play
from tests.small import backwards, batch, build
from tests.stages import EACH_STAGE, PAGE_STAGES
from tests.transport.mapping import mirror_of, sharded, unequal, weights_of


def _by_methods(model: nn.Module) -> None:
    for weight in weights_of(model):
        weight.mul_(2)


def _by_data(model: nn.Module) -> None:
    for weight in weights_of(model):
        weight.data.mul_(2)
        weight.data[0].zero_()


def _by_views(model: nn.Module) -> None:
    for weight in weights_of(model):
        weight.t()[0].mul_(2) if weight.dim() > 1 else weight[1:3].mul_(2)


def _by_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def _unreported(model: nn.Module) -> None:
    torch._foreach_mul_(weights_of(model), 2)


def _into(model: nn.Module) -> None:
    for weight in weights_of(model):
        torch.add(weight, 1, out=weight)


EDITS = (_by_methods, _by_data, _by_views, _by_parameters, _unreported, _into)


def _edited(rank: int, world: int, stage: int, edit: Callable[[nn.Module], None]) -> tuple[list[str], list[str]]:
    """Edits before a step, in which the weights change once more, and after it."""
    model, plain = build(), build()
    engine = sharded(model, stage)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(3):
        with torch.no_grad():
            model(batch(rank))  # pages show shards
            edit(model)
            edit(plain)
        for unit in engine.units:
            unit.write_back_edits()  # those of which nobody has told are known when somebody looks
        assert unequal(model, plain) == []
        if step == 1:
            dist.barrier()
            time.sleep(0.01 * rank)
        backwards(step)(model, rank)
        play(plain, world, backwards(step), stage)
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    wrong = unequal(model, plain)
    dist.barrier()
    shown = [unit.name for unit in engine.units if mirror_of(unit).moved]
    dist.barrier()
    return wrong, shown


@EACH_STAGE
@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_all_ranks_are_made_once(ranks: Ranks, stage: int, edit: Callable[[nn.Module], None]) -> None:
    for wrong, moved in ranks(2).run(_edited, stage, edit):
        assert wrong == []
        assert moved == [], "after a step shards show again"


def _edit_beside_a_holder(rank: int, world: int, stage: int) -> tuple[bool, bool, list[str]]:
    """Rank 1 edits while rank 0, which holds the page, waits at a meeting for something else."""
    model, plain = build(), build()
    engine = sharded(model, stage)
    with torch.no_grad():
        model(batch(rank))
        plain.blocks[0].up.weight.mul_(2)
    held = model.blocks[0].up.weight
    before = held.detach().clone()
    if rank == 1:
        with torch.no_grad():
            held.mul_(2)
    engine.coordinator.values("here", lambda: None)
    unedited = torch.equal(held, before) == (rank == 0)
    whole = torch.equal(engine.units[1].page.own_part(0), engine.units[1].pieces[0]) or rank == 0
    if rank == 0:
        with torch.no_grad():
            held.mul_(2)
    dist.barrier()
    return unedited, whole, unequal(model, plain)


@EACH_STAGE
def test_an_edit_does_not_show_to_who_has_not_made_it(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_edit_beside_a_holder, stage) == [(True, True, [])] * 2


def _edited_under_full_params(rank: int, world: int, stage: int) -> list[str]:
    model, plain = build(), build()
    engine = sharded(model, stage)
    for _ in range(2):
        with torch.no_grad():
            model(batch(rank))
            with engine.full_params(write=True) as full:
                for name, tensor in full.items():
                    tensor.mul_(2)
                    assert torch.equal(tensor, 2 * plain.get_parameter(name))
            for param in plain.parameters():
                param.mul_(2)
    wrong = unequal(model, plain)
    dist.barrier()
    return wrong


@PAGE_STAGES
def test_edits_under_full_params(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_edited_under_full_params, stage) == [[]] * 2


def _written_by_one(rank: int, world: int, stage: int) -> list[str]:
    """What the writer writes reaches all; what others write meanwhile is theirs, and gone after it."""
    model, plain = build(), build()
    engine = sharded(model, stage)
    with torch.no_grad():
        model(batch(rank))
        with engine.full_params(writer=1) as full:
            for tensor in full.values():
                tensor.add_(rank + 1)
        for param in plain.parameters():
            param.add_(2)
    wrong = unequal(model, plain)
    dist.barrier()
    return wrong


@PAGE_STAGES
def test_edits_by_one_writer(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_written_by_one, stage) == [[]] * 2


def _write_that_nobody_sees(rank: int, world: int, stage: int) -> tuple[list[str], list[str]]:
    """Through DLPack, which moves no counter: it reaches no other rank, and is gone after the next step."""
    model, plain = build(), build()
    sharded(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model(batch(rank))
        if rank == 0:
            alias = torch.from_dlpack(torch.utils.dlpack.to_dlpack(model.head.weight.detach()))  # type: ignore[attr-defined]
            alias.fill_(9.0)
            del alias
    dist.barrier()
    before = unequal(model, plain) if rank == 1 else []
    dist.barrier()
    backwards(0)(model, rank)
    optimizer.step()
    after = unequal(model, plain)
    dist.barrier()
    return before, after


@EACH_STAGE
def test_a_write_that_nobody_sees_stays_here(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_write_that_nobody_sees, stage) == [([], [])] * 2
