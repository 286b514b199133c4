"""Models on the meta device become real on the accelerator, where that is what the ranks are for."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from tests.accelerator import device
from tests.accelerator.training import build
from tests.harness import Ranks
from tests.live import live_bytes
from tests.multiproc.on_meta import MODELS, SEED, Unresettable, Wide, init_own
from tests.small import Small
from tests.stages import OPPOSITE_STAGES

WORLD = 2
GRAIN = 512  # the device's memory comes in multiples of it
CPU = torch.device("cpu")
EACH_OFFLOAD = pytest.mark.parametrize("offload", (None, "optimizer", "parameters"))


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


# ---- values
def _equal_to(expected: nn.Module, model: nn.Module, engine: rg.Engine, where: torch.device) -> None:
    assert engine.device == where
    assert {buffer.device for buffer in model.buffers()} <= {where}
    state = model.state_dict()
    for key, value in expected.state_dict().items():
        assert state[key].device == value.device == where
        assert torch.equal(state[key], value), key


def _materialized(rank: int, world: int, name: str, stage: int, offload: str | None) -> set[str]:
    """Where the leaves are, when all is as in a plain model that was made on the device."""
    where = device.of_rank(rank)
    with device.use("lazy"):
        torch.manual_seed(SEED)
        with where:
            expected = MODELS[name]()
        after = torch.get_rng_state()
        model = on_meta(MODELS[name])
        torch.manual_seed(SEED)
        engine = rg.shard(model, stage, offload=offload, timeout=20.0)
        assert torch.equal(torch.get_rng_state(), after), "the state of the random numbers is another one"
        _equal_to(expected, model, engine, where)
        dist.barrier()
    return {param.device.type for param in model.parameters()}


@OPPOSITE_STAGES
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_a_model_made_on_the_device(late_ranks: Ranks, name: str, stage: int) -> None:
    assert late_ranks(WORLD).run(_materialized, name, stage, None) == [{device.NAME}] * WORLD


@OPPOSITE_STAGES
@pytest.mark.parametrize("offload", ("optimizer", "parameters"))
def test_leaves_are_on_the_host_with_offload(late_ranks: Ranks, stage: int, offload: str) -> None:
    for name in ("net", "transformer"):
        assert late_ranks(WORLD).run(_materialized, name, stage, offload) == [{"cpu"}] * WORLD


def _made_by_init(rank: int, world: int, offload: str | None) -> None:
    where = device.of_rank(rank)
    with device.use("lazy"):
        with where:
            expected = Unresettable()
        torch.manual_seed(SEED)
        expected.apply(init_own)
        model = on_meta(Unresettable)
        torch.manual_seed(SEED)
        engine = rg.shard(model, init=init_own, offload=offload, timeout=20.0)
        _equal_to(expected, model, engine, where)
        for mine, wanted in zip(model.buffers(), expected.buffers(), strict=True):
            assert torch.equal(mine, wanted)
        dist.barrier()


@EACH_OFFLOAD
def test_init_gives_what_apply_gives(late_ranks: Ranks, offload: str | None) -> None:
    late_ranks(WORLD).run(_made_by_init, offload)


class Turned(nn.Module):
    """Two layers with one table, which is not on the meta device: it says itself where it is made."""

    first: nn.Linear
    second: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        angles = torch.arange(6.0, device="cpu")
        self.first.register_buffer("angles", angles, persistent=False)
        self.second.register_buffer("angles", angles, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.first.angles) * self.second.angles


def _with_a_real_buffer(rank: int, world: int) -> None:
    where = device.of_rank(rank)
    with device.use("lazy"):
        model = on_meta(Turned)
        rg.shard(model, timeout=20.0)
        tables = [model.first.angles, model.second.angles]  # type: ignore[union-attr]
        assert tables[0] is tables[1]
        assert tables[0].device == where
        assert torch.equal(tables[0].cpu(), torch.arange(6.0))
        assert bool(model(torch.ones(2, 6, device=where)).isfinite().all())
        dist.barrier()


def test_buffers_that_are_real_come_along(late_ranks: Ranks) -> None:
    late_ranks(WORLD).run(_with_a_real_buffer)


def _copied(rank: int, world: int) -> None:
    """A copy of a sharded model begins on the meta device."""
    where = device.of_rank(rank)
    with device.use("lazy"):
        model = build("mlp", where)
        rg.shard(model, timeout=20.0)
        second = copy.deepcopy(model)
        assert {param.device for param in second.parameters()} == {where}
        wanted = model.state_dict()
        assert all(torch.equal(value, wanted[key]) for key, value in second.state_dict().items())
        dist.barrier()


def test_a_copy_is_where_the_model_is(late_ranks: Ranks) -> None:
    late_ranks(WORLD).run(_copied)


# ---- where
def _places(rank: int, world: int) -> list[bool]:
    """Is it on this rank's device? By default, by a mesh and by a process group, each of the device and of the CPU."""
    where = device.of_rank(rank)

    def made(model: nn.Module | None = None, **how: Any) -> bool:
        engine = rg.shard(on_meta(Small) if model is None else model, timeout=20.0, **how)
        assert {param.device for param in engine.model.parameters()} == {engine.device}
        assert engine.device in (where, CPU)
        return engine.device == where

    found = [made(), made(mesh=init_device_mesh(device.NAME, (world,)))]
    found += [made(mesh=init_device_mesh("cpu", (world,))), made(process_group=dist.new_group(backend="gloo"))]
    found += [made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, device="meta")))]
    both = f"cpu:gloo,{device.NAME}:gloo"  # as gloo is where there are GPUs
    with mock.patch.object(dist, "get_backend_config", lambda group=None: both):
        found += [made(), made(mesh=init_device_mesh(device.NAME, (world,)))]
    dist.barrier()
    return found


def test_mesh_and_process_group_say_where(late_ranks: Ranks) -> None:
    assert late_ranks(WORLD).run(_places) == [[True, True, False, False, False, False, True]] * WORLD


# ---- memory
class Held(NamedTuple):
    """Bytes on the device, and of the host's tensors."""

    peak: int
    after: int
    on_host: int
    shards: int
    layer: int  # the largest module
    whole: int
    stubs: int


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN


def _held(rank: int, world: int, units: Any) -> Held:
    device.of_rank(rank)
    model = on_meta(Wide)
    dist.barrier()
    torch.accelerator.synchronize()
    before, before_on_host = torch.accelerator.memory_allocated(), live_bytes()
    torch.accelerator.reset_peak_memory_stats()
    engine = rg.shard(model, 3, units=units, timeout=20.0)
    layouts = [unit.layout for unit in engine.units]
    found = Held(
        torch.accelerator.max_memory_allocated() - before,
        torch.accelerator.memory_allocated() - before,
        live_bytes() - before_on_host,
        sum(_rounded(layout.shard_bytes) for layout in layouts),
        _rounded(4 * 64 * 64) + _rounded(4 * 64),
        sum(layout.page_bytes for layout in layouts),
        GRAIN * sum(1 + len(layout.slots) for layout in layouts),
    )
    dist.barrier()
    return found


@pytest.mark.parametrize("units", ("auto", nn.Linear))
def test_never_more_than_a_module_beyond_the_shards(late_ranks: Ranks, units: Any) -> None:
    """Behind every unit's full tensors there is a stub, and one for each of them while the unit is made."""
    for seen in late_ranks(WORLD).run(_held, units):
        assert seen.shards + seen.layer <= seen.peak <= seen.shards + seen.layer + seen.stubs
        assert seen.shards <= seen.after <= seen.shards + seen.stubs
        assert seen.on_host == 0
        assert seen.shards + seen.layer + seen.stubs < seen.whole, "or the test would show nothing"
