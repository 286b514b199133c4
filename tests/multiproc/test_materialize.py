"""Models on the meta device become the model that the same seed builds, wherever and however they are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.live import live_bytes
from tests.small import Small
from tests.stages import EACH_STAGE, EACH_WORLD, OPPOSITE_STAGES, WITH_OTHERS

SEED = 41


class Tied(nn.Module):
    """The head shares the embedding's weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Small()
        self.body.head.weight = self.body.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids)


class Net(nn.Module):
    """Buffers, and modules whose reset is not a plain draw."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 3)
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)) for _ in range(3))
        self.memory = nn.LSTM(5, 4, num_layers=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.pair = nn.Bilinear(2, 3, 2)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.first.requires_grad_(False)
        self.rest = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.PReLU()) for _ in range(2))


class Shared(nn.Module):
    """One layer under two names, which draws its numbers once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again, self.last = self.first, nn.Linear(6, 6)


class Parent(nn.Module):
    """Its reset knows its children's shapes and sets some of them, as GPT's scaled initialisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 40)
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.second.weight, std=0.02)
        self.first.bias.data.zero_()
        nn.init.normal_(self.scale, std=self.second.weight.shape[0] ** -0.5)


class Container(nn.Module):
    """It has no parameters of its own, and draws those of its children again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 7) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]


class Transformer(nn.Transformer):
    """torch's own, whose reset goes over all parameters."""

    def __init__(self) -> None:
        super().__init__(8, 2, 1, 1, dim_feedforward=12)


MODELS = {
    "small": Small,
    "tied": Tied,
    "net": Net,
    "frozen": Frozen,
    "shared": Shared,
    "parent": Parent,
    "container": Container,
    "transformer": Transformer,
}


def _materialized(rank: int, world: int, name: str, stage: int) -> None:
    torch.manual_seed(SEED)
    expected = MODELS[name]()
    after = torch.get_rng_state()
    with torch.device("meta"):
        model = MODELS[name]()
    before = dict(model.named_parameters())
    torch.manual_seed(SEED)
    rg.shard(model, stage)
    assert torch.equal(torch.get_rng_state(), after), "the state of the random numbers is another one"
    assert all(param is before[key] for key, param in model.named_parameters())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert not any(t.device.type == "meta" for t in [*model.parameters(), *model.buffers()])
    state = model.state_dict()
    for key, value in expected.state_dict().items():
        assert state[key].dtype == value.dtype and torch.equal(state[key], value), key
    if name == "tied":
        assert len(list(model.parameters())) == len(list(expected.parameters()))
    dist.barrier()


@EACH_WORLD
@OPPOSITE_STAGES
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_unsharded_model(ranks: Ranks, name: str, stage: int, world: int) -> None:
    ranks(world).run(_materialized, name, stage)


class Reading(Parent):
    def reset_parameters(self) -> None:
        self.second.weight.data.mul_(0.5)
        nn.init.ones_(self.scale)


class Replacing(Parent):
    def reset_parameters(self) -> None:
        self.second.weight = nn.Parameter(torch.zeros(40, 6))
        nn.init.ones_(self.scale)


def _refused(rank: int, world: int, kind: type[Parent]) -> str:
    with torch.device("meta"):
        model = kind()
    with pytest.raises(rg.RetrogradeError) as caught:  # its own error, or the other rank's if that came first
        rg.shard(model, 3)
    return str(caught.value)


@pytest.mark.parametrize("kind", (Reading, Replacing))
def test_a_reset_that_needs_its_children_is_refused(ranks: Ranks, kind: type[Parent]) -> None:
    """Of them a rank has only its part by then."""
    for text in ranks(2).run(_refused, kind):
        assert "second.weight" in text and kind.__name__ in text and "after rg.shard()" in text, text


# ---- by a function of the user's
class Scale(nn.Module):
    """As transformers' norms and rotary embeddings: no reset, a weight, and a buffer that is not saved."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("frequencies", torch.arange(6.0), persistent=False)


class Unresettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Scale()) for _ in range(3))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Sequential):  # as GPT's scaled initialisation
        nn.init.normal_(module[0].weight, std=0.001)
    if isinstance(module, Scale):
        nn.init.uniform_(module.weight)
        module.frequencies.copy_(torch.arange(6.0))


def _made_by_init(rank: int, world: int, stage: int) -> None:
    expected = Unresettable()
    torch.manual_seed(SEED)
    expected.apply(_init)
    after = torch.get_rng_state()
    with torch.device("meta"):
        model = Unresettable()
    torch.manual_seed(SEED)
    rg.shard(model, stage, init=_init)
    assert torch.equal(torch.get_rng_state(), after), "the state of the random numbers is another one"
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
    for (name, made), wanted in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(made, wanted), name
    dist.barrier()


@EACH_WORLD
@OPPOSITE_STAGES
def test_init_gives_what_apply_gives(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_made_by_init, stage)


def _made_by_nobody(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Unresettable()
    rg.shard(model, 3, init=lambda module: None)
    assert all(value.isnan().all() for value in model.state_dict().values())
    dist.barrier()


def test_what_init_leaves_out_is_not_a_number(ranks: Ranks) -> None:
    ranks(2).run(_made_by_nobody)


def _init_on_one_rank(rank: int, world: int) -> str:
    with torch.device("meta"):
        model = Unresettable()
    with pytest.raises(rg.RetrogradeError) as caught:
        rg.shard(model, 3, init=_init if rank == 0 else None)
    return str(caught.value)


def test_a_rank_without_init(ranks: Ranks) -> None:
    """It says what it lacks, and nobody waits for it."""
    for text in ranks(2).run(_init_on_one_rank):
        assert "layers.0.1 (Scale)" in text and "init=" in text, text


# ---- memory
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(8))
        self.head = nn.Linear(64, 10)


@contextmanager
def _sampled(samples: list[int]) -> Iterator[None]:
    """Live bytes at the end of every reset: the module's full parameters exist then."""
    reset = nn.Linear.reset_parameters

    def measured(self: nn.Linear) -> None:
        reset(self)
        samples.append(live_bytes())

    nn.Linear.reset_parameters = measured  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = reset  # type: ignore[method-assign]


def _held(rank: int, world: int, units: Any) -> dict[str, Any]:
    with torch.device("meta"):
        model = Wide()
    samples: list[int] = []
    dist.barrier()
    before = live_bytes()
    with _sampled(samples):
        engine = rg.shard(model, 3, units=units)
    layouts = [unit.layout for unit in engine.units]
    dist.barrier()
    return {
        "peak": max(samples) - before,
        "after": live_bytes() - before,
        "samples": len(samples),
        "shards": sum(layout.shard_bytes for layout in layouts),
        "unit": max(layout.page_bytes for layout in layouts),
        "whole": sum(layout.page_bytes for layout in layouts),
        "stubs": 4 * sum(2 * len(layout.slots) for layout in layouts),
    }


@WITH_OTHERS
@pytest.mark.parametrize("units", ("auto", nn.Linear))
def test_never_more_than_a_unit_beyond_the_shards(ranks: Ranks, units: Any, world: int) -> None:
    for seen in ranks(world).run(_held, units):
        assert seen["samples"] == 17
        # Every parameter has a one-element stub behind its full tensor.
        assert seen["shards"] < seen["peak"] <= seen["shards"] + seen["unit"] + seen["stubs"]
        assert seen["shards"] <= seen["after"] <= seen["shards"] + seen["stubs"]
        assert seen["shards"] + seen["unit"] < seen["whole"], "or the test would show nothing"


# ---- real devices
def _own_seeds(rank: int, world: int, stage: int) -> None:
    """As DDP: rank 0's values are everybody's, buffers too."""
    torch.manual_seed(SEED)
    expected = Net()
    expected.norms[1][0].running_mean.fill_(5)
    torch.manual_seed(SEED + rank)
    model = Net()
    model.norms[1][0].running_mean.fill_(5 + rank)
    model.norms[2][0].num_batches_tracked.fill_(rank)
    rg.shard(model, stage)
    state = model.state_dict()
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key], value), key
    dist.barrier()


@WITH_OTHERS
@EACH_STAGE
def test_ranks_with_their_own_seeds_get_rank_0s_values(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_own_seeds, stage)


def _mixed(rank: int, world: int) -> None:
    """A real body and a head on the meta device."""
    torch.manual_seed(SEED)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.manual_seed(SEED)
    body = nn.Linear(4, 4)
    model = nn.Sequential(body, nn.Linear(4, 3, device="meta"))
    rg.shard(model, 3)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
    dist.barrier()


def test_a_model_that_is_partly_on_meta(ranks: Ranks) -> None:
    ranks(2).run(_mixed)
