"""`coalesce_grad_reduction()` and `no_sync()`: bit for bit local accumulation, and one reduction of each unit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde.deepspeed as deepspeed
from retrograde.transport.connections import Connections
from retrograde.transport.messages import Message
from retrograde.transport.wires import Sending
from tests.deepspeed.pair import Pair, WithLoss, build_with_loss, config
from tests.harness import Ranks
from tests.live import live_bytes
from tests.reference import Program, in_one_window, same
from tests.small import batch
from tests.stages import EACH_STAGE
from tests.transport.hosts import over_connections

BACKWARDS = (1, 2, 4, 8)


class Cell(NamedTuple):
    contiguous: bool
    overlap: bool
    backwards: int
    retained: bool

    @property
    def zero(self) -> dict[str, Any]:
        """Every parameter but the smallest is larger than the bucket."""
        return {
            "contiguous_gradients": self.contiguous,
            "overlap_comm": self.overlap,
            "reduce_bucket_size": 32,
        }


CELLS = [Cell(*values) for values in itertools.product((False, True), (False, True), BACKWARDS, (False, True))]


def _forwards(model: nn.Module, rank: int, cell: Cell) -> Iterator[torch.Tensor]:
    """A loss for each backward: of a forward each, or all of one retained forward."""
    if not cell.retained:
        for part in range(cell.backwards):
            yield model(batch(rank, part))
        return
    loss = model(batch(rank))
    for part in range(cell.backwards):
        yield loss * (part + 1)


def _plain(cell: Cell) -> Program:
    def program(model: nn.Module, rank: int) -> None:
        for part, loss in enumerate(_forwards(model, rank, cell), start=1):
            loss.backward(retain_graph=cell.retained and part < cell.backwards)

    return program


def _counts(engine: deepspeed.DeepSpeedEngine) -> set[int]:
    return {engine.sharded.ledger.count("reduce", unit.name) for unit in engine.sharded.units}


def _matrix(rank: int, world: int, stage: int, cells: Sequence[Cell], more: dict[str, Any]) -> list[str]:
    """`more`: sections of ZeRO's beside the cell's own."""
    faults = []
    for cell in cells:
        zero = {**cell.zero, **more}
        engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(stage, zero_optimization=zero))
        with engine.coalesce_grad_reduction():
            for part, loss in enumerate(_forwards(engine, rank, cell), start=1):
                engine.set_gradient_accumulation_boundary(part == cell.backwards)
                engine.backward(loss, retain_graph=cell.retained and part < cell.backwards)
        want = in_one_window(build_with_loss, world, _plain(cell))
        got = engine.sharded.full_grads()  # at stage 1 this is the reduction
        faults += [f"{cell}: {name}" for name in want if not same(got[name], want[name])]
        if _counts(engine) != {1}:
            faults.append(f"{cell}: reductions {_counts(engine)}")
        before = engine.global_steps
        engine.step()
        if engine.global_steps != before + 1:
            faults.append(f"{cell}: no step")
        dist.barrier()
    return faults


@EACH_STAGE
def test_matrix(ranks: Ranks, stage: int) -> None:
    assert len(CELLS) == 32
    assert ranks(2).run(_matrix, stage, CELLS, {}) == [[], []]


# As DeepSpeed's own tests ask for it. On the CPU offload moves nothing, and is to change nothing.
OFFLOADS = {
    "optimizer": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@EACH_STAGE
@pytest.mark.parametrize("offload", OFFLOADS)
def test_matrix_with_offload(ranks: Ranks, stage: int, offload: str) -> None:
    cells = [cell for cell in CELLS if cell.contiguous == cell.overlap and cell.backwards in (1, 4)]
    assert len(cells) == 8
    assert ranks(2).run(_matrix, stage, cells, OFFLOADS[offload]) == [[], []]


# ---- at the wire
def _sent_in_a_window(rank: int, world: int, stage: int, cell: Cell) -> tuple[int, int]:
    """Bytes of tensors that this rank has sent in a window and an update, and what one gradient and its reads are."""
    with over_connections():  # where bytes can be counted; in shared memory none are sent
        asked = config(stage, zero_optimization=cell.zero)
        engine, optimizer, *_ = deepspeed.initialize(model=build_with_loss(), config=asked)
    engine(batch(rank)).detach()  # at stages 1 and 2 the pages are there from now on
    sent: list[int] = []  # by two threads: `append` is one operation
    real_send = Connections.send

    def send(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> Sending:
        sent.append(sum(tensor.nbytes for tensor in data))
        return real_send(self, dst, message, data=data)

    dist.barrier()
    engine.sharded.ledger.clear()
    Connections.send = send  # type: ignore[method-assign]
    dist.barrier()
    try:
        with engine.coalesce_grad_reduction():
            for part, loss in enumerate(_forwards(engine, rank, cell), start=1):
                engine.backward(loss, retain_graph=cell.retained and part < cell.backwards)
        optimizer.step()  # the engine's own step sends norms as well
        dist.barrier()
    finally:
        Connections.send = real_send  # type: ignore[method-assign]
    layouts = [unit.layout for unit in engine.sharded.units]
    gradient = sum(layout.page_bytes - layout.shard_bytes for layout in layouts)
    return sum(sent), gradient + engine.sharded.ledger.bytes("gather")


@EACH_STAGE
def test_one_gradient_goes_over_the_wire(ranks: Ranks, stage: int) -> None:
    """Whatever the keys say, however many backwards there are, over one forward or many."""
    several = [cell for cell in CELLS if cell.backwards == 4]  # every key
    others = [cell for cell in CELLS if cell.backwards != 4 and cell.contiguous and not cell.overlap]  # every number
    assert (len(several), len(others)) == (8, 6)
    for cell in (*several, *others):
        for sent, expected in ranks(2).run(_sent_in_a_window, stage, cell):
            assert sent == expected, cell


# ---- memory
def _memory(rank: int, world: int, stage: int, backwards: int) -> dict[str, Any]:
    engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(stage))
    inside: list[int] = []
    for _ in range(2):  # the first step makes the momentum
        start = _live()
        inside = []
        with engine.coalesce_grad_reduction():
            for part in range(backwards):
                engine.backward(engine(batch(rank, part)))
                inside.append(_live() - start)
        grads = [p.grad for p in engine.parameters()] if stage > 1 else []
        after = _live() - start
        del grads
        engine.step()
    layouts = [unit.layout for unit in engine.sharded.units]
    sizes = sorted((layout.page_bytes for layout in layouts), reverse=True)
    return {
        "inside": set(inside),
        "after": after,
        "gradient": sum(sizes),
        "shards": sum(layout.shard_bytes for layout in layouts),
        "two": sum(sizes[:2]),
    }


def _live() -> int:
    """On one rank while the others are still: service threads come and go."""
    dist.barrier()
    live = live_bytes()
    dist.barrier()
    return live


@EACH_STAGE
@pytest.mark.parametrize("backwards", (2, 4, 8))
def test_a_window_holds_one_gradient_and_leaves_a_shard(ranks: Ranks, stage: int, backwards: int) -> None:
    for seen in ranks(2).run(_memory, stage, backwards):
        pages = seen["two"] if stage == 3 else 0  # the memory of the page in use and of the next one is used again
        assert seen["inside"] == {seen["gradient"] + pages}
        if stage == 1:
            assert seen["after"] == seen["gradient"], "at stage 1 the end of the window is the step"
        else:
            # Two buckets are kept for the next backward, until the step.
            assert seen["after"] == seen["shards"] + seen["two"] + pages


# ---- windows in a step
def _two_windows(rank: int, world: int, stage: int) -> tuple[list[str], set[int]]:
    """Two windows and a backward outside, in one step with accumulation."""
    pair = Pair(rank, world, config(stage, 8))
    engine, groups = pair.engine, ((0, 1, 2), (3,), (4, 5, 6, 7))
    for group in groups:
        with engine.coalesce_grad_reduction() if len(group) > 1 else contextlib.nullcontext():
            for part in group:
                engine.backward(engine(batch(rank, part)))
    for group in groups if stage > 1 else [sum(groups, ())]:

        def program(model: nn.Module, rank: int, group: tuple[int, ...] = group) -> None:
            for part in group:
                (model(batch(rank, part)) / 8).backward()

        pair.plain_play(program, one_window=True)
    wrong, counts = pair.wrong_grads(), _counts(engine)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    pair.plain_step()
    wrong += pair.wrong_weights()
    pair.close()
    return wrong, counts


@EACH_STAGE
def test_two_windows_in_a_step(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_two_windows, stage) == [([], {1 if stage == 1 else 3})] * 2


def _raises(rank: int, world: int, stage: int, window: str) -> tuple[list[str], bool | None]:
    """What came before counts, as it would in torch; the boundary is what it was before."""
    pair = Pair(rank, world, config(stage))
    engine = pair.engine
    with pytest.raises(ZeroDivisionError), getattr(engine, window)():
        engine.set_gradient_accumulation_boundary(False)
        for part in range(3):
            engine.backward(engine(batch(rank, part)))
        raise ZeroDivisionError
    boundary = engine._boundary
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    pair.plain_play(_backwards(0, 1, 2), one_window=True)
    pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong, boundary


def _backwards(*parts: int) -> Program:
    def program(model: nn.Module, rank: int) -> None:
        for part in parts:
            model(batch(rank, part)).backward()

    return program


@EACH_STAGE
def test_an_exception_in_a_window(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_raises, stage, "coalesce_grad_reduction") == [([], None)] * 2
    assert ranks(2).run(_raises, stage, "no_sync") == [([], False)] * 2


def _accumulates(rank: int, world: int, stage: int, inside: bool) -> list[str]:
    """Accumulation by `step()` calls inside the window, or a window for each micro step."""
    pair = Pair(rank, world, config(stage, 2))
    engine = pair.engine
    for step in range(2):
        with engine.coalesce_grad_reduction() if inside else contextlib.nullcontext():
            for part in (2 * step, 2 * step + 1):
                with contextlib.nullcontext() if inside else engine.coalesce_grad_reduction():
                    engine.backward(engine(batch(rank, part)))
                    engine.backward(engine(batch(rank, 10 + part)))
                if not inside:
                    engine.step()
            if inside:
                engine.step()  # counts, and does not update
        if inside:
            engine.step()
        parts = [(part, 10 + part) for part in (2 * step, 2 * step + 1)]
        # At stage 1 a step is one group, however many windows it has.
        for group in [parts[0] + parts[1]] if inside or stage == 1 else parts:
            pair.plain_play(_divided(2, *group), one_window=True)
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


def _divided(divisor: int, *parts: int) -> Program:
    def program(model: nn.Module, rank: int) -> None:
        for part in parts:
            (model(batch(rank, part)) / divisor).backward()

    return program


@pytest.mark.parametrize("inside", (True, False))
@EACH_STAGE
def test_accumulation_inside_and_outside(ranks: Ranks, stage: int, inside: bool) -> None:
    assert ranks(2).run(_accumulates, stage, inside) == [[], []]


# ---- what DeepSpeed refuses
def _refused_there(rank: int, world: int, stage: int) -> list[str]:
    """`no_sync` at stages 2 and 3, windows in windows, and a step inside of them."""
    pair = Pair(rank, world, config(stage, managed_gradient_accumulation=False))
    engine = pair.engine
    with engine.no_sync():
        engine.backward(engine(batch(rank, 0)))
        with engine.no_sync(), engine.coalesce_grad_reduction():
            engine.backward(engine(batch(rank, 1)))
        with engine.coalesce_grad_reduction():
            engine.backward(engine(batch(rank, 2)))
            engine.step()  # updates with what is there, in a window or not
            engine.backward(engine(batch(rank, 3)))
    engine.step()
    for parts in ((0, 1, 2), (3,)):
        pair.plain_play(_backwards(*parts), one_window=True)
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


@EACH_STAGE
def test_what_deepspeed_refuses_in_windows(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_refused_there, stage) == [[], []]


def _no_sync_twice(rank: int, world: int, stage: int) -> bool:
    """The same data gives the same losses and norms in a second context, after `zero_grad()`."""
    engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(stage))
    runs = []
    for _ in range(2):
        engine.zero_grad()
        seen = []
        with engine.no_sync():
            for part in range(4):
                loss = engine(batch(rank, part))
                engine.backward(loss)
                norms = [deepspeed.utils.safe_get_full_grad(p).norm() for p in engine.parameters()]
                seen.append((loss.item(), sum(norms).item()))
        runs.append(seen)
    dist.barrier()
    return runs[0] == runs[1] and len(set(runs[0])) == 4


@EACH_STAGE
def test_a_second_no_sync_starts_anew(ranks: Ranks, stage: int) -> None:
    assert all(ranks(2).run(_no_sync_twice, stage))


def _different_units(rank: int, world: int, stage: int) -> list[str]:
    """In a window each rank leaves out another block, and a frozen one stays frozen."""
    engine, *_ = deepspeed.initialize(model=_with_frozen(), config=config(stage))
    with engine.coalesce_grad_reduction():
        for part in range(2):
            engine.backward(_skipping(engine.module, rank, part))

    def program(model: nn.Module, rank: int) -> None:
        for part in range(2):
            _skipping(model, rank, part).backward()

    want = in_one_window(_with_frozen, world, program)
    got = engine.sharded.full_grads()
    wrong = [name for name in want if not same(got[name], want[name])]
    dist.barrier()
    return wrong


def _with_frozen() -> WithLoss:
    model = build_with_loss()
    model.blocks[1].requires_grad_(False)
    return model


def _skipping(model: nn.Module, rank: int, part: int) -> torch.Tensor:
    x = model.embed(batch(rank, part))
    for index, block in enumerate(model.blocks):
        if index != 2 + rank:
            x = block(x)
    return x.square().mean()


@EACH_STAGE
def test_ranks_that_use_other_blocks_in_a_window(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_different_units, stage) == [[], []]
