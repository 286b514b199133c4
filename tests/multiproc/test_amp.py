"""torch.amp over sharded models: `GradScaler` as it is, and autocast, whose casts of weights are not kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import RankPool
from tests.multiproc.precise import PreciseTwin
from tests.multiproc.twin import RATE, Twin
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE, EACH_WORLD

Ranks = Callable[[int], RankPool]
STEPS = 6


# ---- GradScaler
def _scaled(rank: int, world: int, stage: int, fused: bool) -> tuple[list[float], list[bool]]:
    """In the third step one rank's gradients overflow, wherever they are owned: no rank updates.

    A fused optimizer divides by the scale itself, and looks whether it found an overflow."""
    twin = PreciseTwin(rank, world, stage, "fp16")
    twin.optimize(lambda params: torch.optim.AdamW(params, lr=RATE, fused=fused))
    ours, plain = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2))
    plain.scale(torch.zeros(()))  # it has one when it is first asked; the program below scales by hand
    scales, moved = [], []
    for step in range(STEPS):
        scale = ours.get_scale()
        blown = 2.0**30 if step == 2 else 1.0

        def program(model: nn.Module, rank: int, scale: float = scale, step: int = step, blown: float = blown) -> None:
            loss = loss_of(model, batch(rank, step)) * (blown if rank == world - 1 else 1.0)
            (loss.float() * scale).backward()

        before = twin.plain.head.weight.detach().clone()
        loss = loss_of(twin.model, batch(rank, step)) * (blown if rank == world - 1 else 1.0)
        ours.scale(loss.float()).backward()
        twin.plain_play(program)
        for scaler, optimizer, model in zip((plain, ours), twin.optimizers, twin.both, strict=True):
            if not fused:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(model.parameters(), 2.0**-6)
            scaler.step(optimizer)
            scaler.update()
        twin.follow()
        twin.check_weights()
        twin.check_pages()
        twin.zero_grad()
        assert ours.get_scale() == plain.get_scale()
        scales.append(ours.get_scale())
        moved.append(not torch.equal(before, twin.plain.head.weight))
    twin.close()
    return scales, moved


@EACH_WORLD
@EACH_STAGE
@pytest.mark.parametrize("fused", (False, True), ids=("unscaled", "fused"))
def test_grad_scaler(ranks: Ranks, stage: int, world: int, fused: bool) -> None:
    scales = [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11]
    moved = [step != 2 for step in range(STEPS)]
    assert ranks(world).run(_scaled, stage, fused) == [(scales, moved)] * world


# ---- autocast
def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, ids)


def _cast_by_autocast(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    for step in range(2):
        loss = _loss(twin.model, batch(rank, step))
        loss.backward(retain_graph=True)
        loss.backward()

        def program(model: nn.Module, rank: int, step: int = step) -> None:
            loss = _loss(model, batch(rank, step))
            loss.backward(retain_graph=True)
            loss.backward()

        twin.plain_play(program)
        twin.check_grads()
        twin.step()
        twin.check_weights()
        twin.zero_grad()
    twin.close()


@EACH_WORLD
@EACH_STAGE
def test_autocast(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_cast_by_autocast, stage)


class Chain(nn.Module):
    """Products and a convolution; a weight has more elements than any activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.second = nn.Linear(64, 32, bias=False)
        self.third = nn.Conv1d(2, 64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.relu(self.first(x))).view(1, 2, 16)).sum()


def _kept(rank: int, world: int, how: str) -> list[int]:
    """Elements of the tensors that are kept between forward and backward, by hooks around ours."""
    torch.manual_seed(0)
    model = Chain()
    engine = rg.shard(model, units=[nn.Linear, nn.Conv1d])
    if "frozen" in how:
        model.second.requires_grad_(False)
    if how == "all frozen":
        model.requires_grad_(False)
    kept: list[int] = []
    x = torch.ones(1, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        with torch.autocast("cpu", torch.bfloat16, enabled=how != "plain"):
            loss = model(x)
    pages = sum(unit.page.ready for unit in engine.units)
    loss.backward()
    assert pages <= 2, "one in use and one prefetched"
    dist.barrier()
    return sorted(numel for numel in kept if numel >= 2048)


@pytest.mark.parametrize("how", ("plain", "autocast", "frozen", "all frozen"))
def test_no_cast_weight_is_kept(ranks: Ranks, how: str) -> None:
    assert ranks(2).run(_kept, how) == [[]] * 2


def _frozen_by_autocast(rank: int, world: int) -> list[int]:
    """Adapters are trained beside frozen weights, three of which have the same shape. Returns what is kept."""
    twin = Twin(rank, world, 3, _adapted)
    kept: list[int] = []
    for step in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
            loss = _adapted_loss(twin.model, rank, step)
        loss.backward()
        twin.plain_play(lambda model, rank, step=step: _adapted_loss(model, rank, step).backward())
    twin.check_grads()
    twin.close()
    return [numel for numel in kept if numel >= 32 * 32]


class Adapted(nn.Module):
    """Three frozen matrices of one shape, and what is trained beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)).requires_grad_(False)
        self.trained = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, trained in zip(self.frozen, self.trained, strict=True):
            x = torch.relu(frozen(x)) + trained(x)
        return x


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), Adapted())


def _adapted_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def test_frozen_weights_beside_adapters(ranks: Ranks) -> None:
    assert ranks(2).run(_frozen_by_autocast) == [[]] * 2


def _stale(rank: int, world: int) -> None:
    model = build()
    rg.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = _loss(model, batch(rank))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .parameter head\.weight. is at version"):
        loss.backward()
    dist.barrier()


def test_a_cast_weight_that_has_changed(ranks: Ranks) -> None:
    ranks(2).run(_stale)
