"""What a rank does that strays from the order of collectives: programs for tests on the host and on a device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retrograde.transport.connections import Connections
from retrograde.transport.messages import Message
from tests import small
from tests.multiproc.twin import Twin
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


@contextlib.contextmanager
def counting(messages: Counter[str]) -> Iterator[None]:
    """Adds what this rank sends meanwhile, by the kind of message."""
    send = Connections.send

    def sending(self: Connections, dst: int, message: Message, data: Sequence[Tensor] = ()) -> object:
        messages[type(message).__name__] += 1
        return send(self, dst, message, data)

    with mock.patch.object(Connections, "send", sending):
        yield


def seen_by_a_hook(twin: Twin) -> list[tuple[Tensor, Tensor]]:
    """What a hook sees of a gradient that one rank puts and another brings to a call, and what there is after it."""
    seen: list[Tensor] = []
    found: list[Tensor] = []
    leaf = dict(twin.model.named_parameters())["blocks.2.up.weight"]
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.local.clone()))
    for program in (blocks, blocks, _takes_another_order):
        program(twin.model, twin.rank)
        assert leaf.grad is not None
        found.append(leaf.grad.local.cpu())
        twin.plain_play(program)
        twin.check_grads()
        twin.zero_grad()
    return list(zip([each.cpu() for each in seen], found, strict=True))
