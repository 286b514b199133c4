"""torch.distributed.checkpoint: what is saved at one number of ranks, stage and grouping is read at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import retrograde as rg
from tests.harness import Ranks
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE

State = dict[str, Any]


class Odd(nn.Module):
    """Parameters of no, one and four dimensions, one that lies otherwise in memory, one without elements, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(torch.randn((), generator=generator))
        self.bias = nn.Parameter(torch.randn(11, generator=generator))
        self.kernel = nn.Parameter(torch.randn(2, 3, 2, 3, generator=generator).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(7, 5, generator=generator).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(float(seed)))

    def forward(self) -> Tensor:
        total = self.scale.pow(2) + self.bias.pow(2).sum() + self.kernel.pow(3).sum()
        return total + self.turned.pow(2).sum() + self.nothing.sum()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2**-4)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    """Alike on all ranks, so that any number of them is at the same place."""
    loss = model() if isinstance(model, Odd) else loss_of(model, batch(0, step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def make(kind: str, seed: int) -> nn.Module:
    return Odd(seed) if kind == "odd" else build(seed)


def whole(state: State) -> State:
    """The same with everything whole and plain."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if not isinstance(state, Tensor):
        return state
    return (state.full_tensor() if hasattr(state, "full_tensor") else state).detach().clone()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """All of it, on every rank."""
    return {"model": dict(model.state_dict()), "state": whole(optimizer.state_dict()["state"])}


def difference(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        return [found for key in one for found in difference(one[key], other[key], f"{path}.{key}")]
    same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
    return [] if same else [path]


# ---- saving and loading
def _saved(rank: int, world: int, path: str, kind: str, stage: int) -> State:
    model = make(kind, 3)
    engine = rg.shard(model, stage)
    optimizer = adam(model)
    for step in range(2):
        stepped(model, optimizer, step)
    dcp.save({"model": engine.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return states(model, optimizer)


def _load(model: rg.Engine | nn.Module, optimizer: Optimizer, path: str) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _loaded(rank: int, world: int, path: str, kind: str, stage: int, **options: Any) -> State:
    """Into another model of the same shapes, whose optimizer has stepped once, by which it has a state."""
    model = make(kind, 5)
    if options.pop("replicas", False):
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    engine = rg.shard(model, stage, **options)
    optimizer = adam(model)
    stepped(model, optimizer)
    _load(engine, optimizer, path)
    found = states(model, optimizer)
    stepped(model, optimizer)  # goes on
    dist.barrier()
    return found


@pytest.mark.parametrize("kind", ("small", "odd"))
@pytest.mark.parametrize(
    ("world", "stage", "options"),
    ((2, 1, {"units": nn.Linear}), (4, 3, {}), (1, 2, {}), (4, 2, {"replicas": True})),
    ids=("2 ranks", "4 ranks", "1 rank", "2 replicas of 2 ranks"),
)
def test_another_world_stage_and_grouping(
    ranks: Ranks, tmp_path: Path, world: int, stage: int, options: dict[str, Any], kind: str
) -> None:
    if kind == "odd":
        options = {key: value for key, value in options.items() if key != "units"}
    saved = ranks(3).run(_saved, str(tmp_path), kind, 3)[0]
    for loaded in ranks(world).run(_loaded, str(tmp_path), kind, stage, **options):
        assert difference(saved, loaded) == []


def _loaded_plain(rank: int, world: int, path: str, kind: str) -> State:
    model = make(kind, 5)
    optimizer = adam(model)
    stepped(model, optimizer)
    _load(model, optimizer, path)
    return states(model, optimizer)


@pytest.mark.parametrize("kind", ("small", "odd"))
@EACH_STAGE
def test_a_plain_model_reads_it(ranks: Ranks, tmp_path: Path, stage: int, kind: str) -> None:
    saved = ranks(2).run(_saved, str(tmp_path), kind, stage)[0]
    assert difference(saved, ranks(1).run(_loaded_plain, str(tmp_path), kind)[0]) == []


def _loaded_by_fsdp(rank: int, world: int, path: str) -> State:
    model = build(5)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adam(model)
    stepped(model, optimizer)
    _load(model, optimizer, path)
    return {"model": whole(model.state_dict()), "state": whole(optimizer.state_dict()["state"])}


def test_fsdp2_reads_it(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(3).run(_saved, str(tmp_path), "small", 3)[0]
    for loaded in ranks(2).run(_loaded_by_fsdp, str(tmp_path)):
        assert difference(saved, loaded) == []


def _saved_plain(rank: int, world: int, path: str) -> State:
    model = build(3)
    optimizer = adam(model)
    stepped(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return states(model, optimizer)


def test_that_of_a_plain_model_is_read(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(1).run(_saved_plain, str(tmp_path))[0]
    for loaded in ranks(2).run(_loaded, str(tmp_path), "small", 3):
        assert difference(saved, loaded) == []


# ---- the model's memory
def _waits(rank: int, world: int, path: str) -> None:
    """Saving copies nothing; what is loaded reaches the model with load_state_dict(), and gradients are saved too."""
    model = build(3)
    engine = rg.shard(model, 3)
    shown = engine.state_dict()
    leaves = dict(model.named_parameters())
    assert all(shown[name].local.data_ptr() == leaf.local.data_ptr() for name, leaf in leaves.items())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dcp.save({"model": shown}, checkpoint_id=path)
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.zero_()
    state = {"model": engine.state_dict()}
    dcp.load(state, checkpoint_id=path)
    assert not any(value.any() for value in model.state_dict().values())
    with pytest.raises(BaseException, match=r"load into engine\.state_dict\(\)"):  # a CheckpointException is no other
        dcp.load({"model": leaves}, checkpoint_id=path)
    engine.load_state_dict(state["model"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    dist.barrier()


def test_what_is_loaded_waits(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_waits, str(tmp_path))


def _gradients(rank: int, world: int, path: str) -> None:
    model = build(3)
    rg.shard(model, 3)
    loss_of(model, batch(rank)).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    wanted = {name: grad.full_tensor() for name, grad in grads.items()}
    dcp.save({"grads": grads}, checkpoint_id=path)
    empty = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    dcp.load({"grads": empty}, checkpoint_id=path)
    assert all(torch.equal(empty[name].full_tensor(), value) for name, value in wanted.items())
    dist.barrier()


def test_gradients(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_gradients, str(tmp_path))


def _stateful(rank: int, world: int, path: str) -> None:
    """Engine and optimizer have the two methods that torch asks objects for."""
    model = build(3)
    engine = rg.shard(model, 3)
    optimizer = adam(model)
    stepped(model, optimizer)
    wanted = states(model, optimizer)
    dcp.save({"model": engine, "optimizer": optimizer}, checkpoint_id=path)
    stepped(model, optimizer, 1)
    dcp.load({"model": engine, "optimizer": optimizer}, checkpoint_id=path)
    assert difference(wanted, states(model, optimizer)) == []
    dist.barrier()


def test_objects_that_have_a_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_stateful, str(tmp_path))
