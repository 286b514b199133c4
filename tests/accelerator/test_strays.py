"""Ranks that stray from the order of collectives on a device: exact values, no race, nothing hangs; and a step that
follows the order is as before, without messages and without waiting for the device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests import small
from tests.accelerator import device
from tests.accelerator.ranks import TELLING_MODES
from tests.accelerator.training import on_device
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.patterns.cells import LIMIT
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE, STAGES_WITH_OTHERS
from tests.transport.strays import (
    ORDERS,
    STEPS,
    STRAY_AT,
    STRAYS,
    Counted,
    counting,
    counts_of,
    seen_by_a_hook,
    through,
)

TIMEOUT = 20.0
EXACT = pytest.mark.parametrize("exact", (True, False))


def _made(where: torch.device) -> nn.Module:
    return device.move(build(), where)


class Seen(NamedTuple):
    """Of one step: messages, and how often the host waited for the device, by cause."""

    counted: Counted
    waits: dict[str, int]


def _with_a_stray(
    rank: int, world: int, stage: int, kind: str, exact: bool, mode: str = "lazy", seed: int = 0
) -> list[Seen]:
    messages: Counter[str] = Counter()
    found = []
    with on_device(rank, mode, seed) as where:
        twin = Twin(rank, world, stage, functools.partial(_made, where), exact=exact, timeout=TIMEOUT)
        twin.optimize()
        for step in range(STEPS):
            program = STRAYS[kind].once if step == STRAY_AT else STRAYS[kind].always
            twin.plain_play(program)
            twin.optimizers[0].step()
            dist.barrier()
            messages.clear()
            device.reset_counters()
            with counting(messages):
                program(twin.model, rank)
                twin.optimizers[1].step()
                waits = device.synchronisations()
                dist.barrier()
            found.append(Seen(counts_of(messages, world), waits))
            twin.check()
            twin.zero_grad()
    return found


def _check_quiet(seen: list[list[Seen]], world: int, exact: bool) -> None:
    """Before the stray, and in the last step."""
    for rank, steps in enumerate(seen):
        quiet = Counted(world - 1 if rank == 0 else 1, 0, 0)
        assert (steps[STRAY_AT - 1].counted, steps[-1].counted) == (quiet, quiet)
        if not exact:
            assert (steps[STRAY_AT - 1].waits, steps[-1].waits) == ({}, {})


@pytest.mark.parametrize("kind", STRAYS)
@STAGES_WITH_OTHERS
def test_a_stray_is_served_and_exact(late_ranks: Ranks, world: int, stage: int, kind: str) -> None:
    seen = late_ranks(world).run(_with_a_stray, stage, kind, True, timeout=LIMIT)
    _check_quiet(seen, world, exact=True)


@pytest.mark.parametrize("kind", STRAYS)
@EACH_STAGE
def test_a_stray_is_served_in_the_backends_order(late_ranks: Ranks, stage: int, kind: str) -> None:
    """It is exact with two ranks, of which one strays: there is one order of two numbers."""
    seen = late_ranks(2).run(_with_a_stray, stage, kind, False, timeout=LIMIT)
    _check_quiet(seen, 2, exact=False)


def _with_others(rank: int, world: int, kind: str) -> None:
    with on_device(rank, "lazy", 0) as where:
        twin = Twin(rank, world, 3, functools.partial(_made, where), exact=False, timeout=TIMEOUT)
        for program in (STRAYS[kind].always, STRAYS[kind].always, STRAYS[kind].once):
            twin.plain_play(program)
            program(twin.model, rank)
            grads = twin.engine.full_grads()
            for name, plain in twin.plain.named_parameters():
                found = grads[name]
                assert found is not None
                assert plain.grad is not None
                torch.testing.assert_close(found, plain.grad, rtol=1e-5, atol=1e-7)  # added up in another order
            twin.zero_grad()


@pytest.mark.parametrize("kind", STRAYS)
def test_several_ranks_in_the_backends_order(late_ranks: Ranks, kind: str) -> None:
    late_ranks(4).run(_with_others, kind, timeout=LIMIT)


@pytest.mark.parametrize("kind", ("skips a unit", "takes another order"))
@EXACT
@TELLING_MODES
def test_in_every_order(late_ranks: Ranks, kind: str, exact: bool, mode: str, seed: int) -> None:
    late_ranks(2).run(_with_a_stray, 3, kind, exact, mode, seed, timeout=LIMIT)


# ---- nobody sees a part of a sum
def _up_to_a_stray(rank: int, world: int, kind: str, exact: bool) -> Iterator[Twin]:
    """Both models after each of four backwards, of which the last is a stray's."""
    with on_device(rank, "lazy", 0) as where:
        twin = Twin(rank, world, 3, functools.partial(_made, where), exact=exact, timeout=TIMEOUT)
        for program in (*[STRAYS[kind].always] * 3, STRAYS[kind].once):
            twin.plain_play(program)
            program(twin.model, rank)
            yield twin
            twin.zero_grad()


def _clipped(rank: int, world: int, kind: str, exact: bool) -> None:
    """The norm is of complete sums, and so is what is given out as a plain tensor."""
    for twin in _up_to_a_stray(rank, world, kind, exact):
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in twin.both]
        torch.testing.assert_close(*norms)  # of parts, added up in another order


@pytest.mark.parametrize("kind", STRAYS)
@EXACT
def test_norms_are_of_complete_sums(late_ranks: Ranks, kind: str, exact: bool) -> None:
    late_ranks(2).run(_clipped, kind, exact, timeout=LIMIT)


def _looked_at(rank: int, world: int, kind: str, exact: bool) -> None:
    for twin in _up_to_a_stray(rank, world, kind, exact):
        plain = dict(twin.plain.named_parameters())
        for name, leaf in twin.model.named_parameters():
            grad, whole = leaf.grad, plain[name].grad
            assert grad is not None
            assert whole is not None
            assert torch.equal(grad.local, leaf.cut(whole))  # type: ignore[attr-defined]


# Of a backward that it did not do itself a rank hears at its next meeting, which a look is not where sums are exact.
@pytest.mark.parametrize("kind", [kind for kind in STRAYS if kind != "one backward fewer"])
@EXACT
def test_what_is_given_out_is_complete(late_ranks: Ranks, kind: str, exact: bool) -> None:
    late_ranks(2).run(_looked_at, kind, exact, timeout=LIMIT)


def _hooked(rank: int, world: int, exact: bool) -> list[tuple[Tensor, Tensor]]:
    with on_device(rank, "lazy", 0) as where:
        return seen_by_a_hook(Twin(rank, world, 3, functools.partial(_made, where), exact=exact, timeout=TIMEOUT))


@EXACT
def test_hooks_see_complete_sums(late_ranks: Ranks, exact: bool) -> None:
    for pairs in late_ranks(2).run(_hooked, exact, timeout=LIMIT):
        assert len(pairs) == 3
        assert all(torch.equal(seen, found) for seen, found in pairs)


def _captured(rank: int, world: int, exact: bool) -> Tensor:
    with on_device(rank, "lazy", 0) as where:
        model = _made(where)
        rg.shard(model, exact=exact, timeout=TIMEOUT)
        for step in range(3):
            loss = through(model, small.batch(rank, step), ORDERS[rank] if step == 2 else ORDERS[0])
            (grad,) = torch.autograd.grad(loss, [model.get_submodule("blocks.2.up").weight])
        return grad.cpu()


@EXACT
def test_autograd_grad_returns_complete_sums(late_ranks: Ranks, exact: bool) -> None:
    plain = build()
    parts = [
        torch.autograd.grad(through(plain, batch(rank, 2), ORDERS[rank]), [plain.blocks[2].up.weight])[0]
        for rank in range(2)
    ]
    for grad in late_ranks(2).run(_captured, exact, timeout=LIMIT):
        assert torch.equal(grad, (parts[0] + parts[1]) / 2)


# ---- nothing hangs
def _synchronises_alone(rank: int, world: int, exact: bool) -> float:
    """Rank 0 waits for all of its device, where calls are under way to which rank 1 does not come: it waits for rank 0
    in a barrier of the user's."""
    with on_device(rank, "lazy", 0) as where:
        model = _made(where)
        rg.shard(model, exact=exact, timeout=TIMEOUT)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model, small.batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                loss_of(model, small.batch(rank, 0))
            torch.accelerator.synchronize()
        dist.barrier()
        with torch.no_grad():
            return float(loss_of(model, small.batch(7, 0)))


@EXACT
def test_a_rank_that_waits_for_its_device_alone(late_ranks: Ranks, exact: bool) -> None:
    first, second = late_ranks(2).run(_synchronises_alone, exact, timeout=LIMIT)
    assert first == second


def _says_it_before_the_step(rank: int, world: int) -> None:
    """Ranks talk between a backward, in which one strays, and the step: a rank that waited for the others at the end of
    its backward would wait for ever."""
    with on_device(rank, "lazy", 0) as where:
        twin = Twin(rank, world, 3, functools.partial(_made, where), timeout=TIMEOUT)
        twin.optimize()
        for step in range(5):
            program = STRAYS["takes another order"].once if step == 3 else STRAYS["takes another order"].always
            twin.plain_play(program)
            program(twin.model, rank)
            dist.barrier()
            twin.step()
            twin.check()
            twin.zero_grad()


def test_a_stray_is_not_waited_for_at_the_end_of_a_backward(late_ranks: Ranks) -> None:
    late_ranks(2).run(_says_it_before_the_step, timeout=LIMIT)


def _never_comes(rank: int, world: int, exact: bool) -> str:
    """Rank 1 waits for rank 0 in a barrier, which waits for rank 1 at its step."""
    with on_device(rank, "lazy", 0) as where:
        model = _made(where)
        rg.shard(model, exact=exact, timeout=3.0)
        if rank == 1:
            dist.barrier()
            return ""
        with pytest.raises(rg.DivergenceError) as caught:
            loss_of(model, small.batch(rank)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        dist.barrier()
        return str(caught.value)


@EXACT
def test_a_rank_that_never_comes_is_named(late_ranks: Ranks, exact: bool) -> None:
    text, _ = late_ranks(2).run(_never_comes, exact)
    assert "rank 0 waited" in text
    assert "rank 1 is outside" in text
