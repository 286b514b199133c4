"""Pages in which other ranks' shards show: nothing is copied, and nobody sees a change before its time."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.layout.flat import MEMORY_PAGE, WORTH_MAPPING, Layout
from retrograde.pages import PageState
from retrograde.transport.connections import Connections
from retrograde.transport.mapped import mirror as mirrors
from retrograde.transport.mapped import transport as mapped
from retrograde.transport.mapped.mirror import can_mirror
from retrograde.transport.mapped.transport import MappedTransport
from retrograde.transport.wires import Sending
from tests.harness import Ranks
from tests.reference import play, same
from tests.small import Small, backwards, batch, build, loss_of
from tests.stages import EACH_STAGE, PAGE_STAGES, WITH_OTHERS
from tests.transport.mapping import mirror_of, sharded, unequal, weights_of


# ---- layout
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("whole", (False, True))
def test_shards_that_are_not_small_are_whole_memory_pages(dtype: torch.dtype, whole: bool) -> None:
    shapes = [("a", torch.Size([700, 301])), ("b", torch.Size([3])), ("c", torch.Size([90_001]))]
    layout = Layout(shapes, dtype, 3, shard_of=(0, 1, 2) if whole else None)
    assert layout.mappable
    for rank in range(3):
        assert layout.bytes_of(rank) % MEMORY_PAGE == 0
        assert layout.span(rank).start * dtype.itemsize % MEMORY_PAGE == 0
    for slot in layout.slots:
        pieces = [layout.piece(slot, rank) for rank in range(3)]
        assert sum(piece.stop - piece.start for piece in pieces) == slot.numel


def test_small_shards_are_not_padded() -> None:
    numel = WORTH_MAPPING // 4 - 16
    layout = Layout([("a", torch.Size([2 * numel]))], torch.float32, 2)
    assert layout.shard_sizes == (numel, numel) and not layout.mappable


# ---- what the system does
def test_this_system_can() -> None:
    assert can_mirror()


# ---- ranks
class _Counted:
    """What is copied from other ranks' shards, and what goes over connections."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._copy, self._send = MappedTransport._copy, Connections.send

    def __enter__(self) -> Counter[str]:
        counts, copy, send = self.counts, self._copy, self._send

        def counted_copy(transport: MappedTransport, *args: Any) -> bool:
            counts["copy"] += 1
            return copy(transport, *args)

        def counted_send(connections: Connections, dst: int, message: Any, data: Any = ()) -> Sending:
            counts[type(message).__name__] += 1
            return send(connections, dst, message, data)

        MappedTransport._copy = counted_copy  # type: ignore[method-assign]
        Connections.send = counted_send  # type: ignore[method-assign]
        return counts

    def __exit__(self, *error: object) -> None:
        MappedTransport._copy = self._copy  # type: ignore[method-assign]
        Connections.send = self._send  # type: ignore[method-assign]


def _trains_without_copies(rank: int, world: int, stage: int) -> dict[str, Any]:
    model, plain = build(), build()
    engine = sharded(model, stage)
    optimizer, plain_optimizer = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
    states, own = set(), 0

    def look(*_: object) -> None:
        nonlocal own
        states.update(unit.page.state for unit in engine.units if unit.page.ready)
        own = max(own, engine.ledger.resident)

    for module in model.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    dist.barrier()
    with _Counted() as counts:
        for step in range(3):
            backwards(step, step + 1)(model, rank)
            optimizer.step()
            optimizer.zero_grad()
            play(plain, world, backwards(step, step + 1), stage)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        counted = dict(counts)
    ledger = engine.ledger
    seen = {
        "counts": counted,
        "states": states,
        "own": own,
        "bytes": ledger.bytes("gather"),
        "gathers": {ledger.count("gather", unit.name) for unit in engine.units},
        "wrong": unequal(model, plain),
    }
    dist.barrier()
    return seen


@EACH_STAGE
@WITH_OTHERS
def test_a_gather_moves_nothing(ranks: Ranks, stage: int, world: int) -> None:
    for seen in ranks(world).run(_trains_without_copies, stage):
        assert seen["counts"] == {}, "nothing is copied, and nothing goes over connections"
        assert seen["states"] == {PageState.LIVE}
        assert seen["own"] == 0, "no page has memory of its own"
        assert seen["bytes"] == 0
        assert min(seen["gathers"]) >= 3
        assert seen["wrong"] == []
        if stage < 3:
            assert seen["gathers"] == {3}, "where pages stay they come once a step"


def _diverging(model: nn.Module, rank: int) -> None:
    """Ranks do different numbers of backwards, of different parts."""
    for step in range(rank % 3):
        loss_of(model, batch(rank, step)).backward()
    if rank % 2:
        assert isinstance(model, Small)
        model.blocks[rank % 4](torch.full((2, 12), float(rank))).square().sum().backward()


def _trains_diverging(rank: int, world: int, stage: int) -> list[str]:
    model, plain = build(), build()
    sharded(model, stage)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for _ in range(3):
        _diverging(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        play(plain, world, _diverging, stage)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wrong = unequal(model, plain)
    dist.barrier()
    return wrong


@EACH_STAGE
@WITH_OTHERS
def test_ranks_that_diverge_are_exact(ranks: Ranks, stage: int, world: int) -> None:
    assert ranks(world).run(_trains_diverging, stage) == [[]] * world


# ---- steps
class Unknown(torch.optim.Optimizer):
    """Nobody knows whether it is element by element; it is not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad * param.abs().max())


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _held_over_a_step(rank: int, world: int, stage: int, make: Callable[..., torch.optim.Optimizer]) -> list[bool]:
    model, plain = build(), build()
    sharded(model, stage)
    optimizer, plain_optimizer = make(model.parameters()), make(plain.parameters())
    held = model.blocks[1].down.weight
    seen = []

    def before_the_step(*_: object) -> None:
        seen.append(torch.equal(held, plain.blocks[1].down.weight))

    optimizer.register_step_pre_hook(before_the_step)
    for step in range(3):
        backwards(step)(model, rank)
        play(plain, world, backwards(step), stage)
        time.sleep(0.01 * ((rank + step) % 2))
        optimizer.step()
        plain_optimizer.step()
        seen.append(torch.equal(held, plain.blocks[1].down.weight))
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    seen.append(unequal(model, plain) == [])
    dist.barrier()
    return seen


@EACH_STAGE
@pytest.mark.parametrize("make", (_sgd, Unknown))
def test_a_page_that_is_held_over_a_step(ranks: Ranks, stage: int, make: Callable[..., torch.optim.Optimizer]) -> None:
    assert ranks(2).run(_held_over_a_step, stage, make) == [[True] * 7] * 2


def _kept_by_others_until(rank: int, world: int, stage: int) -> tuple[bool, bool]:
    """Rank 0 is slow to let go after the meeting of a step: rank 1 does not write before it has."""
    model = build()
    engine = sharded(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backwards(0)(model, rank)
    held = model.head.weight
    before = held.detach().clone()
    after: list[bool] = []
    let_go = engine.pager.let_go

    def slow(stepping: bool) -> None:
        if held is not None:
            after.append(torch.equal(held, before))
            time.sleep(0.2)
            after.append(torch.equal(held, before))
        let_go(stepping)

    model.head.weight.register_hook(lambda grad: grad)  # so that ranks let go after the meeting
    if rank == 0:
        engine.pager.let_go = slow  # type: ignore[method-assign]
    optimizer.step()
    engine.pager.let_go = let_go  # type: ignore[method-assign]
    dist.barrier()
    return all(after), not torch.equal(held, before)


@EACH_STAGE
def test_nobody_writes_what_another_sees(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_kept_by_others_until, stage) == [(True, True)] * 2


# ---- elements that are given out
def _given_out(rank: int, world: int, stage: int) -> tuple[bool, bool, bool]:
    """Rank 1 writes to its own elements, which nobody reports, while they show in a page of rank 0."""
    model = build()
    engine = sharded(model, stage, timeout=5.0)
    with torch.no_grad():
        model(batch(rank))
    held = model.head.weight
    before = held.detach().clone()
    was_live = engine.units[0].page.live
    dist.barrier()
    if rank == 1:
        for leaf in model.parameters():
            leaf.local.add_(1.0)  # type: ignore[attr-defined]
    dist.barrier()
    shows = torch.equal(held, before)
    live = any(mirror_of(unit).shows and 1 in mirror_of(unit)._shown for unit in engine.units)
    dist.barrier()
    return was_live, shows, live


@PAGE_STAGES
def test_elements_that_are_given_out_do_not_show(ranks: Ranks, stage: int) -> None:
    first, second = ranks(2).run(_given_out, stage)
    assert first == (True, True, False)
    assert second[0] and not second[2]


# ---- the end
def _blocks(engine: rg.Engine) -> int:
    assert isinstance(engine.transport, MappedTransport)
    return os.fstat(engine.transport._neighbours.arena.descriptor).st_blocks


def _let_go_of_a_model(rank: int, world: int, stage: int) -> tuple[bool, int]:
    """Rank 1's model goes while a page of rank 0 shows it."""
    keeper = sharded(build(), 3)  # keeps connections and arena
    dist.barrier()
    before = _blocks(keeper)
    model: nn.Module | None = build()
    engine: rg.Engine | None = sharded(model, stage)
    assert model is not None and engine is not None
    held = model.head.weight if rank == 0 else None
    copy = build().head.weight.detach().clone()
    live = engine.units[0].page.live
    dist.barrier()
    if rank == 1:
        engine = model = None
        gc.collect()
    dist.barrier()
    shows = held is None or (live and torch.equal(held, copy))
    held = engine = model = None
    gc.collect()
    dist.barrier()
    assert isinstance(keeper.transport, MappedTransport)
    keeper.transport._neighbours.arena._collect_gone()
    left = _blocks(keeper) - before
    dist.barrier()
    return shows, left


@PAGE_STAGES
def test_memory_of_a_model_that_is_gone_stays_while_it_shows(ranks: Ranks, stage: int) -> None:
    for shows, left in ranks(2).run(_let_go_of_a_model, stage):
        assert shows
        assert left <= 2 * MEMORY_PAGE // 512, "only the words by which ranks tell each other stay"


def _forked(rank: int, world: int) -> tuple[int, bool]:
    """A process that was forked has what its parent had then, and does nothing to its parent's."""
    model, plain = build(), build()
    engine = sharded(model, 2)
    held = model.head.weight
    tell, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(tell, 1)
        right = torch.equal(held, plain.head.weight)
        for unit in engine.units:
            mirror_of(unit).forget()
        os._exit(0 if right else 1)
    with torch.no_grad():
        for each in (model, plain):
            for weight in weights_of(each):
                weight.mul_(2)
    dist.barrier()
    os.write(told, b"!")
    status = os.waitpid(child, 0)[1]
    right = torch.equal(held, plain.head.weight)
    dist.barrier()
    return status, right


def test_a_forked_process_has_what_was_there(ranks: Ranks) -> None:
    assert ranks(2).run(_forked) == [(0, True)] * 2


# ---- where it cannot be
def _without(rank: int, world: int, stage: int, who: int) -> tuple[list[str], int, bool]:
    """Train where a rank's system does not map like this."""
    if rank == who:
        mapped.can_mirror = lambda: False  # type: ignore[assignment]
    try:
        model, plain = build(), build()
        engine = sharded(model, stage)
    finally:
        mapped.can_mirror = mirrors.can_mirror
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(2):
        backwards(step)(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        play(plain, world, backwards(step), stage)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wrong = unequal(model, plain)
    dist.barrier()
    return wrong, engine.ledger.bytes("gather"), engine.units[0].mirror is None


@EACH_STAGE
def test_where_a_system_cannot_pages_are_copies(ranks: Ranks, stage: int) -> None:
    (wrong, moved, without), *others = ranks(3).run(_without, stage, 0)
    assert wrong == [] and moved > 0 and without
    for wrong, moved, without in others:
        assert wrong == [] and moved > 0 and not without  # rank 0's shards are copied


def _bf16(rank: int, world: int, stage: int) -> tuple[list[str], int]:
    """Pages are made of casts of the masters."""
    model, twin = build(), build()
    engine = sharded(model, stage, precision="bf16")
    copied = rg.shard(twin, stage, precision="bf16")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for step in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            backwards(step)(each, rank)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for each in (model, twin):
                for weight in weights_of(each):
                    weight.mul_(1.5)
    backwards(3)(model, rank)
    backwards(3)(twin, rank)
    grads, expected = engine.full_grads(), copied.full_grads()
    wrong = [name for name in grads if not same(grads[name], expected[name])]
    wrong += unequal(model, twin)
    dist.barrier()
    return wrong, int(mirror_of(engine.units[0]).shard.element_size())


@EACH_STAGE
def test_pages_of_another_dtype_than_the_masters(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_bf16, stage) == [([], 2)] * 2
