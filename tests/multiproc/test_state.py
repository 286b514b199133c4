"""`state_dict()` and `load_state_dict()` of a sharded model are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.small import batch, build
from tests.stages import ALONE_OR_NOT, EACH_STAGE, EACH_WORLD


def _saved(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    twin.train(0)
    state, expected = twin.model.state_dict(), twin.plain.state_dict()
    assert list(state) == list(expected) and state._metadata == expected._metadata
    for name, value in expected.items():
        assert type(state[name]) is Tensor and not state[name].requires_grad
        assert state[name].shape == value.shape and torch.equal(state[name], value), name
    part = twin.model.blocks[1].state_dict(prefix="x.")
    assert {name: value.shape for name, value in part.items()} == {
        f"x.{name}": value.shape for name, value in twin.plain.blocks[1].state_dict().items()
    }
    kept = twin.model.state_dict(keep_vars=True)
    assert all(value.requires_grad for value in kept.values())
    before = {name: value.clone() for name, value in state.items()}
    del kept
    twin.train(1)
    assert all(torch.equal(state[name], before[name]) for name in state), "a saved state changed with training"
    if rank == 0:  # nobody else has to call it
        alone = twin.model.state_dict()
        assert all(torch.equal(alone[name], value) for name, value in twin.plain.state_dict().items())
    dist.barrier()
    twin.close()


@EACH_WORLD
@EACH_STAGE
def test_state_dict(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_saved, stage)


def _loaded(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    twin.train(0)
    given = build(11).state_dict()
    copy = {name: value.clone() for name, value in given.items()}
    twin.model(batch(rank))  # pages may be in memory
    for model in twin.both:
        result = model.load_state_dict(given)
        assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(given[name], copy[name]) for name in copy), "the caller's dict was changed"
    assert torch.equal(twin.model(batch(rank)), twin.plain(batch(rank)))
    twin.check_weights()
    twin.train(1)
    twin.check_weights()
    twin.model.load_state_dict(twin.model.state_dict())
    twin.check_weights()
    twin.close()


@ALONE_OR_NOT
@EACH_STAGE
def test_load_state_dict(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_loaded, stage)


def _attempt(model: nn.Module, state: dict[str, Any], **options: Any) -> tuple[list[str], list[str]] | str:
    try:
        result = model.load_state_dict(state, **options)
    except RuntimeError as error:
        return str(error)
    return result.missing_keys, result.unexpected_keys


def _mismatched(rank: int, world: int, stage: int) -> None:
    """The same words as torch's, for the same keys."""
    twin = Twin(rank, world, stage)
    good = build(11).state_dict()
    missing = {name: value for name, value in good.items() if name not in ("head.weight", "blocks.1.up.bias")}
    extra = good | {"blocks.9.up.bias": torch.ones(3), "head.scale": torch.ones(1)}
    shapes = good | {"head.weight": torch.ones(3, 4), "head.bias": torch.ones(5), "blocks.0.up.bias": torch.ones(36, 1)}
    for state in (missing, extra):
        assert _attempt(twin.model, state, strict=False) == _attempt(twin.plain, state, strict=False)
    for state in (missing, extra, shapes, shapes | {"head.scale": torch.ones(1)}):
        plain, ours = (_attempt(model, dict(state)) for model in twin.both)
        assert isinstance(plain, str) and isinstance(ours, str)
        for line in plain.splitlines()[1:]:
            named = line.strip().split(", the shape")[0].replace("torch.Size([", "[").replace("])", "]")
            assert _flat(named) in _flat(ours), f"{line!r} is not in {ours!r}"
    twin.check_weights()
    with pytest.raises(RuntimeError, match=r"assign=True would replace sharded parameters; load with assign=False"):
        twin.model.load_state_dict(good, assign=True)
    twin.check_weights()
    twin.close()


def _flat(text: str) -> str:
    """Shapes are written as a list here and a tuple there."""
    return text.replace("torch.Size(", "").replace("(", "[").replace(",)", "]").replace(")", "]").replace("]]", "]")


@EACH_STAGE
def test_mismatches_are_told_as_torch_does(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_mismatched, stage)


class Own(nn.Module):
    """A module with its own way of being saved and loaded, beside one of torch that has one (BatchNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7))
        self.norm = nn.BatchNorm1d(7)
        self.loaded = 0

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "shape"] = torch.tensor(self.weight.shape)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.loaded += 1
        assert state.pop(prefix + "shape").tolist() == [5, 7]
        super()._load_from_state_dict(state, prefix, *rest)

    def get_extra_state(self) -> int:
        return 17

    def set_extra_state(self, state: int) -> None:
        self.loaded += state

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.weight)


def _own(rank: int, world: int, stage: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return Own()

    twin = Twin(rank, world, stage, make)
    for model in twin.both:
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(1)))
    state, expected = twin.model.state_dict(), twin.plain.state_dict()
    assert list(state) == list(expected)
    torch.manual_seed(4)
    other = Own().state_dict()
    for model in twin.both:
        model.load_state_dict(other)
        assert model.loaded == 18
    assert torch.equal(twin.model.weight, twin.plain.weight)
    assert torch.equal(twin.model.norm.running_mean, twin.plain.norm.running_mean)
    # Checkpoints older than `num_batches_tracked` load, as torch's BatchNorm says.
    old = {name: value for name, value in nn.BatchNorm1d(7).state_dict().items() if "tracked" not in name}
    for model in twin.both:
        model.norm.load_state_dict(old)
    assert int(twin.model.norm.num_batches_tracked) == int(twin.plain.norm.num_batches_tracked)
    twin.close()


@EACH_STAGE
def test_modules_that_save_and_load_in_their_own_way(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_own, stage)


def _between_models(rank: int, world: int) -> None:
    """From one engine to another of another stage, and to a plain model."""
    source = build(21)
    first = source.state_dict()
    first = {name: value.clone() for name, value in first.items()}
    rg.shard(source, 3)
    target = build(22)
    rg.shard(target, 1)
    target.load_state_dict(source.state_dict())
    plain = build(23)
    plain.load_state_dict(target.state_dict())
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in first.items())
    dist.barrier()


def test_from_engine_to_engine(ranks: Ranks) -> None:
    ranks(2).run(_between_models)
