"""Replicas of a sharded model, on ranks that are threads and on imagined ones: who reads what, and adds up what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine.shard import Options, shard_over
from retrograde.layout import Grid
from retrograde.transport import FakeRanks, Key, Stamp, ThreadRanks, Work
from retrograde.transport.fake import FakeTransport
from retrograde.transport.threads import ThreadTransport
from tests import threads
from tests.multiproc.twin import Twin
from tests.small import BLOCKS, Small, backward_that_raises, batch, build, loss_of
from tests.stages import EACH_STAGE, REDUCING_STAGES

Rows = tuple[tuple[int, ...], ...]
SQUARE: Rows = ((0, 1), (2, 3))
SHAPES = pytest.mark.parametrize("rows", (SQUARE, ((0, 1), (2, 3), (4, 5)), ((0,), (1,), (2,)), ((0, 1, 2),)))


class ReplicaTwin(Twin):
    """A model that is sharded over replicas, whose ranks are threads, beside a plain one."""

    def __init__(self, ranks: ThreadRanks, stage: int, rows: Rows, make: Callable[[], nn.Module], **options: Any):
        self.ranks, self.rows, self.replicas = ranks, rows, len(rows)
        super().__init__(ranks.rank, ranks.world, stage, make, **options)

    def _shard(self, options: dict[str, Any]) -> rg.Engine:
        grid = Grid(self.ranks.rank, self.rows)
        return shard_over(self.ranks, self.model, Options(stage=self.stage, timeout=20.0, **options), grid)


def run(rows: Rows, program: Callable[[ReplicaTwin], Any], stage: int, **options: Any) -> list[Any]:
    """Models are made before threads begin: random numbers are the process's."""
    world = sum(map(len, rows))
    made = [iter([build(), build()]) for _ in range(world)]

    def on_rank(ranks: ThreadRanks) -> Any:
        return program(ReplicaTwin(ranks, stage, rows, made[ranks.rank].__next__, **options))

    return threads.run(world, on_rank)


def _a_step_of(backwards: Callable[[nn.Module, int], None]) -> Callable[[ReplicaTwin], None]:
    def program(twin: ReplicaTwin) -> None:
        twin.optimize()
        backwards(twin.model, twin.rank)
        twin.plain_play(backwards)
        twin.step()
        twin.check()

    return program


# ---- exactness
@SHAPES
@EACH_STAGE
def test_training_is_exact(stage: int, rows: Rows) -> None:
    """Several backwards, a window, steps: bit-equal to the sum over each replica's ranks, then over replicas."""

    def program(twin: ReplicaTwin) -> dict[str, Tensor]:
        twin.optimize()
        for step in range(2):
            twin.backwards_and_a_window(step)
            twin.check_grads()
            twin.step()
            twin.zero_grad()
        twin.check_weights()
        return {name: p.detach().as_subclass(Tensor).clone() for name, p in twin.model.named_parameters()}

    pieces = run(rows, program, stage)
    for row in rows[1:]:
        for rank, first in zip(row, rows[0], strict=True):
            assert all(torch.equal(pieces[rank][name], pieces[first][name]) for name in pieces[first])


def test_the_order_of_sums_is_seen() -> None:
    """The reference of one replica is another number: else the tests here would say nothing."""

    def program(twin: ReplicaTwin) -> bool:
        loss_of(twin.model, batch(twin.rank)).backward()
        twin.replicas = 1
        twin.plain_backward(0)
        grads = twin.engine.full_grads()
        return all(torch.equal(grads[name], p.grad) for name, p in twin.plain.named_parameters())

    assert run(SQUARE, program, 3) == [False] * 4


@pytest.mark.parametrize("which", range(4))
@EACH_STAGE
def test_a_rank_of_any_replica_may_differ(stage: int, which: int) -> None:
    """One does a backward more than the others, or none at all."""

    def backwards(model: nn.Module, rank: int) -> None:
        for step in range(3 if rank == which else (rank + 1) % 2):
            loss_of(model, batch(rank, step)).backward()

    run(SQUARE, _a_step_of(backwards), stage)


@EACH_STAGE
def test_a_replica_may_be_idle(stage: int) -> None:
    def backwards(model: nn.Module, rank: int) -> None:
        if rank > 1:
            loss_of(model, batch(rank)).backward()

    run(SQUARE, _a_step_of(backwards), stage)


@EACH_STAGE
def test_questions_about_whole_tensors(stage: int) -> None:
    """Each replica has the whole; counting both would double it."""

    def program(twin: ReplicaTwin) -> None:
        loss_of(twin.model, batch(twin.rank)).backward()
        twin.plain_backward(0)
        name, plain = "blocks.1.up.weight", twin.plain.get_parameter("blocks.1.up.weight").grad
        grad = twin.model.get_parameter(name).grad
        assert grad.sum() == plain.double().sum().float()
        assert torch.equal(grad.max(), plain.max())
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125) for model in twin.both]
        assert torch.allclose(norms[1].as_subclass(Tensor), norms[0], rtol=2e-6)

    run(SQUARE, program, stage)


@REDUCING_STAGES
def test_gradients_of_gradients(stage: int) -> None:
    """All ranks penalise all of the mean gradient."""

    def penalized(loss: Tensor, params: list[Any]) -> Tensor:
        return loss + sum(grad.square().sum() for grad in torch.autograd.grad(loss, params, create_graph=True))

    def program(twin: ReplicaTwin) -> None:
        losses = [loss_of(twin.plain, batch(rank)) for rank in range(twin.world)]
        penalized(sum(losses) / twin.world, list(twin.plain.parameters())).backward()
        penalized(loss_of(twin.model, batch(twin.rank)), list(twin.model.parameters())).backward()
        grads = twin.engine.full_grads()
        for name, param in twin.plain.named_parameters():  # autograd adds the ranks up in an order of its own
            assert torch.allclose(grads[name], param.grad, rtol=1e-4, atol=1e-6), name

    run(SQUARE, program, stage)


@pytest.mark.parametrize("wire", (None, "bf16"))
def test_sums_travel_as_they_were_added_up(wire: str | None) -> None:
    """Gradients in bf16: replicas' sums are in fp32, unless `precision` says what travels."""

    def program(twin: ReplicaTwin) -> Tensor:
        loss_of(twin.model, batch(twin.rank)).backward()
        return twin.engine.full_grad("head.bias")

    def own(rank: int) -> Tensor:
        model = build().bfloat16()
        loss_of(model, batch(rank)).backward()
        return model.head.bias.grad.float()

    made = [build().bfloat16() for _ in range(8)]
    precision = None if wire is None else rg.Precision(reduce=wire)

    def on_rank(ranks: ThreadRanks) -> Tensor:
        make = iter(made[2 * ranks.rank :]).__next__
        return program(ReplicaTwin(ranks, 3, SQUARE, make, precision=precision))

    rows = [own(0) + own(1), own(2) + own(3)]
    if wire is not None:
        rows = [row.bfloat16().float() for row in rows]
    want = ((rows[0] + rows[1]) / 4).bfloat16()
    assert all(torch.equal(got, want) for got in threads.run(4, on_rank))


# ---- who talks to whom
def test_pages_come_from_the_own_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int, int]] = set()
    told: Counter[tuple[int, int]] = Counter()
    read, put = ThreadTransport.read, ThreadTransport.put

    def reading(self: ThreadTransport, unit: int, name: str, stamp: Stamp, into: Mapping[int, Tensor]) -> Work:
        asked.update((self.rank, src) for src in into)
        return read(self, unit, name, stamp, into)

    def putting(self: ThreadTransport, key: Key, parts: Mapping[int, Any]) -> Work:
        told.update((self.rank, dst) for dst in parts)
        return put(self, key, parts)

    monkeypatch.setattr(ThreadTransport, "read", reading)
    monkeypatch.setattr(ThreadTransport, "put", putting)
    run(SQUARE, lambda twin: loss_of(twin.model, batch(twin.rank)).backward(), 3)
    assert asked == {(0, 1), (1, 0), (2, 3), (3, 2)}
    units = BLOCKS + 1
    within = {(0, 1): units, (1, 0): units, (2, 3): units, (3, 2): units}
    across = {(0, 2): units, (2, 0): units, (1, 3): units, (3, 1): units}
    assert told == within | across


def test_a_sum_under_way_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank goes on to add to its sum and to divide it, and a transport may send later."""
    sent: list[tuple[Tensor, Tensor]] = []
    put = FakeTransport.put

    def putting(self: FakeTransport, key: Key, parts: Mapping[int, Any]) -> Work:
        sent.extend((part, part.clone()) for part in parts.get(2, ()))
        return put(self, key, parts)

    monkeypatch.setattr(FakeTransport, "put", putting)
    engine = shard_over(FakeRanks(4, rank=0), build(), Options(stage=3), Grid(0, SQUARE))
    loss_of(engine.model, batch(0)).backward()
    assert len(sent) == BLOCKS + 1
    # As bits: pages of imagined ranks have what was in memory, which may be nan.
    assert all(torch.equal(now.view(torch.int32), then.view(torch.int32)) for now, then in sent)


@pytest.mark.parametrize(("replicas", "shards"), ((2, 2), (4, 8), (3, 1), (1, 3)))
def test_bytes(replicas: int, shards: int) -> None:
    """A page from the replica, a gradient to its owners, and a shard's sum to each other replica."""
    rows = tuple(tuple(range(first, first + shards)) for first in range(0, replicas * shards, shards))
    ranks = FakeRanks(replicas * shards, rank=1)
    engine = shard_over(ranks, build(), Options(stage=3), Grid(1, rows))
    engine.ledger.clear()
    loss_of(engine.model, batch(0)).backward()
    shard = sum(unit.layout.shard_bytes for unit in engine.units)
    page = sum(unit.layout.page_bytes for unit in engine.units)
    assert page == shards * shard
    (transport,) = ranks.transports
    assert transport.nbytes["put"] == page - shard + (replicas - 1) * shard
    assert engine.ledger.bytes("reduce") == transport.nbytes["put"]
    assert transport.nbytes["read"] == engine.ledger.bytes("gather")


# ---- what goes wrong
def test_a_backward_that_all_give_up() -> None:
    """Sums of it may be with the other replica already: they are forgotten, and the next backward is exact."""

    def program(twin: ReplicaTwin) -> None:
        twin.optimize()
        with pytest.raises(ZeroDivisionError):
            backward_that_raises(twin.model, batch(twin.rank))
        twin.zero_grad()
        loss_of(twin.model, batch(twin.rank, 1)).backward()
        twin.plain_backward(1)
        twin.step()
        twin.check_weights()
        assert not [at for at in twin.engine.transport._shared.parts if at[2] == twin.rank and at[0].meeting == 0]

    run(SQUARE, program, 3)


def test_ranks_must_agree_on_who_is_where() -> None:
    models = [build() for _ in range(4)]

    def program(ranks: ThreadRanks) -> str:
        rows = SQUARE if ranks.rank else ((0, 2), (1, 3))
        with pytest.raises(rg.ShardingError) as caught:
            shard_over(ranks, models[ranks.rank], Options(timeout=5.0), Grid(ranks.rank, rows))
        return str(caught.value)

    told = threads.run(4, program)
    assert all("mesh=[[0, 2], [1, 3]] on rank 0, mesh=[[0, 1], [2, 3]] on rank 1" in each for each in told)


def test_replicas_on_the_meta_device_are_equal() -> None:
    """Each rank draws its own numbers: threads share a generator, so all draw others. Replicas take the first one's."""
    with torch.device("meta"):
        models = [Small() for _ in range(4)]

    def program(ranks: ThreadRanks) -> dict[str, Tensor]:
        model = models[ranks.rank]
        shard_over(ranks, model, Options(stage=3, timeout=20.0), Grid(ranks.rank, SQUARE))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    states = threads.run(4, program)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])


def test_explain_says_it() -> None:
    engine = shard_over(FakeRanks(4), build(), Options(stage=3), Grid(0, SQUARE))
    assert "stage 3, 4 rank(s), 2 replicas of 2 shard(s)" in engine.explain()
