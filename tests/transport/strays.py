"""What a rank does that strays from the order of collectives: programs for tests on the host and on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import small
from tests.reference import Program
from tests.small import BLOCKS, Small, backwards, loss_of

STEPS = 7
STRAY_AT = 3  # the step in which a rank does something else: the order knows the others' steps by then
ORDERS = ([0, 1, 2, 3], [2, 0, 3, 1])


def through(model: nn.Module, ids: Tensor, order: Sequence[int]) -> Tensor:
    """A loss by these blocks in this order."""
    assert isinstance(model, Small)
    hidden = model.embed(ids)
    for index in order:
        hidden = model.blocks[index](hidden)
    return model.head(hidden).square().mean()


def blocks(model: nn.Module, rank: int, order: Sequence[int] = range(BLOCKS)) -> None:
    through(model, small.batch(rank), order).backward()


def _skips_a_unit(model: nn.Module, rank: int) -> None:
    blocks(model, rank, [0, 1, 3] if rank == 1 else range(BLOCKS))


def _takes_another_order(model: nn.Module, rank: int) -> None:
    blocks(model, rank, [2, 0, 3, 1] if rank == 1 else range(BLOCKS))


def _one_backward_fewer(model: nn.Module, rank: int) -> None:
    for step in range(1 if rank == 1 else 2):
        loss_of(model, small.batch(rank, step)).backward()


def _evaluate_on_first(model: nn.Module, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            for step in range(3):
                loss_of(model, small.batch(rank, step))


def _evaluates_alone(model: nn.Module, rank: int) -> None:
    _evaluate_on_first(model, rank)
    blocks(model, rank)


def _evaluates_before_a_barrier(model: nn.Module, rank: int) -> None:
    """The others sit in the user's own barrier while rank 0 reads pages."""
    _evaluate_on_first(model, rank)
    if not _is_plain(model):
        dist.barrier()
    blocks(model, rank)


def _is_plain(model: nn.Module) -> bool:
    return type(next(model.parameters())) is nn.Parameter


class Stray(NamedTuple):
    """What all ranks do in every step, and what they do in one."""

    always: Program
    once: Program


STRAYS = {
    "skips a unit": Stray(blocks, _skips_a_unit),
    "takes another order": Stray(blocks, _takes_another_order),
    "one backward fewer": Stray(backwards(0, 1), _one_backward_fewer),
    "evaluates alone": Stray(blocks, _evaluates_alone),
    "evaluates before a barrier": Stray(blocks, _evaluates_before_a_barrier),
}


class Counted(NamedTuple):
    """Of one step on one rank: messages of the order, meetings, and pages that were read one-sidedly."""

    ordered: int
    meetings: int
    reads: int


def counts_of(messages: Counter[str], world: int) -> Counted:
    others = world - 1
    return Counted(messages["Ordered"], messages["Meet"] // others, messages["Read"] // others)
