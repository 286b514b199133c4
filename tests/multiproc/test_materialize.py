"""Models on the meta device become the model that the same seed builds, wherever and however they are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from tests.harness import Ranks
from tests.live import live_bytes
from tests.multiproc.on_meta import MODELS, SEED, Net, Parent, Unresettable, Wide, init_own
from tests.stages import EACH_STAGE, EACH_WORLD, OPPOSITE_STAGES, WITH_OTHERS


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
def _made_by_init(rank: int, world: int, stage: int) -> None:
    expected = Unresettable()
    torch.manual_seed(SEED)
    expected.apply(init_own)
    after = torch.get_rng_state()
    with torch.device("meta"):
        model = Unresettable()
    torch.manual_seed(SEED)
    rg.shard(model, stage, init=init_own)
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
        rg.shard(model, 3, init=init_own if rank == 0 else None)
    return str(caught.value)


def test_a_rank_without_init(ranks: Ranks) -> None:
    """It says what it lacks, and nobody waits for it."""
    for text in ranks(2).run(_init_on_one_rank):
        assert "layers.0.1 (Scale)" in text and "init=" in text, text


# ---- memory
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
