"""Wrong uses: what the error says (names, rank, cause, fix), and that the model is none the worse for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.small import Block, batch, build, loss_of, shards_after_a_mistake
from tests.stages import EACH_STAGE, WITH_OTHERS


def _snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": {name: type(module) for name, module in model.named_modules()},
        "params": {name: (id(p), type(p), p.requires_grad, p.device) for name, p in model.named_parameters()},
        "values": {n: p.detach().clone() if p.device.type != "meta" else p.shape for n, p in model.named_parameters()},
    }


@contextlib.contextmanager
def _refused(model: nn.Module, match: str, kind: type[Exception] = rg.ShardingError) -> Any:
    """The block raises, and leaves `model` as it was."""
    before = _snapshot(model)
    with pytest.raises(kind, match=match):
        yield
    after = _snapshot(model)
    assert after["modules"] == before["modules"] and after["params"] == before["params"]
    for name, value in before["values"].items():
        now = after["values"][name]
        assert torch.equal(now, value) if isinstance(value, Tensor) else now == value, name


class Other(nn.Module):
    """Never part of a model here."""


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"stage": 0}, r"stage=0 is out of range; give 1, 2 or 3"),
    "stage 4": ({"stage": 4}, r"stage=4 is out of range"),
    "stage as text": ({"stage": "3"}, r"stage='3' is out of range"),
    "reduce": ({"reduce": "max"}, r"reduce='max' is not known; give \"mean\" or \"sum\""),
    "resident text": ({"resident": "lots"}, r"resident='lots' is not a size; give bytes or a text like \"2GiB\""),
    "resident dots": ({"resident": "1.2.3GiB"}, r"resident='1\.2\.3GiB' is not a size"),
    "resident unit": ({"resident": "2 parsecs"}, r"resident='2 parsecs' is not a size"),
    "resident negative": ({"resident": -1}, r"resident=-1 is negative; give 0 or more bytes"),
    "units text": ({"units": "blocks"}, r"units='blocks' is not known; give \"auto\", module classes or a predicate"),
    "units number": ({"units": 5}, r"units=5 is not known; give \"auto\", module classes or a predicate"),
    "units class": ({"units": Other}, r"units: no module of class Other in Small; its classes are .*Block.*Small"),
    "units classes": ({"units": (Block, Other)}, r"units: no module of class Other in Small"),
    "precision": ({"precision": "int8"}, r"precision='int8' .*give rg\.Precision"),
    "join": ({"join": "few"}, r"join='few' is not a size"),
}


def _arguments(rank: int, world: int) -> None:
    wrong = []
    for name, (options, match) in ARGUMENTS.items():
        model = build()
        try:
            with _refused(model, match):
                rg.shard(model, **options)
        except BaseException as error:  # all of them in one report; pytest's own failure is a BaseException
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        assert torch.isfinite(model(batch(rank))).all()
    assert not wrong, "\n".join(wrong)


def test_arguments(ranks: Ranks) -> None:
    ranks(2).run(_arguments)


def _groups(rank: int, world: int) -> None:
    model = build()
    mesh = torch.distributed.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    with _refused(model, r"give process_group or mesh, not both"):
        rg.shard(model, mesh=mesh["tp"], process_group=dist.group.WORLD)
    with _refused(model, r"mesh has dimensions \('dp', 'tp'\), not \(replicate, shard\); give one of them, as mesh"):
        rg.shard(model, mesh=mesh)
    engine = rg.shard(model, mesh=mesh["tp"])
    loss_of(model, batch(rank)).backward()
    assert engine.full_grad("head.bias") is not None
    dist.barrier()


def test_process_group_and_mesh(ranks: Ranks) -> None:
    ranks(2).run(_groups)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    model = build()
    with _refused(model, r"no process group: call torch\.distributed\.init_process_group\(\) first"):
        rg.shard(model)
    loss_of(model, batch(0)).backward()


def _twice(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    before = twin.engine
    with pytest.raises(rg.ShardingError, match=r"Small is already sharded; keep the engine of the first shard"):
        rg.shard(twin.model, stage)
    with pytest.raises(rg.ShardingError, match=r"Block is already sharded"):
        rg.shard(twin.model.blocks[0])
    whole = nn.Sequential(twin.model, nn.Linear(17, 3))
    with pytest.raises(rg.ShardingError, match=r"parameter 0\.embed\.weight already belongs to another.*one owner"):
        rg.shard(whole)
    neighbour = nn.Linear(12, 17)
    neighbour.bias = dict(twin.model.named_parameters())["head.bias"]
    with pytest.raises(rg.ShardingError, match=r"parameter bias already belongs to another engine"):
        rg.shard(neighbour)
    with pytest.raises(rg.ShardingError, match=r"Dropout has no parameters to shard"):
        rg.shard(nn.Dropout())
    twin.train(0)
    twin.check_weights()
    assert twin.engine is before
    twin.close()


@EACH_STAGE
def test_already_sharded(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_twice, stage)


# ---- ranks with different models
def _with_names(rank: int) -> nn.Module:
    model = build()
    if rank == 1:
        model.extra = nn.Linear(3, 3)
    return model


def _with_shapes(rank: int) -> nn.Module:
    model = build()
    if rank == 1:
        model.blocks[2].up = nn.Linear(12, 40)
    return model


def _with_dtypes(rank: int) -> nn.Module:
    model = build()
    return model.double() if rank == 1 else model


DIFFERING: dict[str, tuple[Callable[[int], nn.Module], dict[int, dict[str, Any]], str]] = {
    "names": (_with_names, {}, r"differs .*extra\.bias\[3\].*extra\.weight\[3, 3\]"),
    "shapes": (_with_shapes, {}, r"differs .*blocks\.2\.up\.bias\[36\].*blocks\.2\.up\.bias\[40\]"),
    "dtypes": (_with_dtypes, {}, r"differs .*(float64|float32)"),
    "units": (lambda rank: build(), {1: {"units": Block}, 0: {"units": nn.Linear}}, r"differs .*blocks\.0"),
}


def _differing(rank: int, world: int, name: str) -> str:
    make, options, _ = DIFFERING[name]
    model = make(rank)
    with _refused(model, r"rank \d+ differs from that on rank 0"):
        rg.shard(model, **options.get(rank, {}))
    try:
        rg.shard(model, **options.get(rank, {}))
    except rg.ShardingError as error:
        text = str(error)
    model = build()  # now the same on every rank
    rg.shard(model)
    loss_of(model, batch(rank)).backward()
    dist.barrier()
    return text


@pytest.mark.parametrize("name", DIFFERING)
@WITH_OTHERS
def test_models_that_differ(ranks: Ranks, world: int, name: str) -> None:
    for rank, text in enumerate(ranks(world).run(_differing, name)):
        assert text.startswith(f"rank {rank}: the model on rank 1 differs from that on rank 0"), text
        assert re.search(DIFFERING[name][2], text), text
        assert "build the same model with the same arguments on every rank" in text


def _one_refuses(rank: int, world: int) -> str:
    """A mistake on one rank only; corrected, the same ranks shard again."""
    model = build()
    try:
        rg.shard(model, stage=9 if rank == 1 else 3, timeout=2)
    except rg.RetrogradeError as error:
        text = f"{type(error).__name__}: {error}"
    shards_after_a_mistake(model, rank, timeout=5)
    return text


def test_a_mistake_on_one_rank_is_told_to_all_and_can_be_corrected(ranks: Ranks) -> None:
    told, mistaken = ranks(2).run(_one_refuses)
    assert mistaken.startswith("ShardingError: stage=9")
    assert told == f"DivergenceError: rank 1: shard() raised {mistaken}"


# ---- backward
def _backwards(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    loss = loss_of(twin.model, batch(rank))
    loss.backward()
    with pytest.raises(RuntimeError, match=r"Trying to backward through the graph a second time"):
        loss.backward()
    twin.zero_grad()
    twin.train(0)
    loss = loss_of(twin.model, batch(rank, 1))
    twin.train(1)  # a step between forward and backward
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*parameter \S+.*optimizer step"):
        loss.backward()
    twin.zero_grad()
    twin.train(2)
    twin.check_weights()
    with pytest.raises(rg.ShardingError, match=r"'no\.such' is not a parameter of this engine's model"):
        twin.engine.full_grad("no.such")
    if stage == 3:
        with pytest.raises(rg.ShardingError, match=r"budget='10B': unit \S+ needs \d+ bytes, .*; give at least that"):
            next(twin.engine.iter_full_params(budget="10B"))
    twin.close()


@EACH_STAGE
def test_backward_refuses_what_torch_refuses(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_backwards, stage)


def _norms(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 2))
    model.max_norm = 2.0  # anybody's own affair
    with _refused(model, r"module 0: max_norm edits rows that other ranks have; scale rows after the step"):
        rg.shard(model)


def test_rows_that_forward_edits(ranks: Ranks) -> None:
    ranks(2).run(_norms)


def _graded(rank: int, world: int) -> None:
    """Parameters that are added are looked at as closely as the first."""
    model = build()
    engine = rg.shard(model)
    model.extra = nn.Linear(3, 3)
    model.extra(torch.ones(2, 3)).sum().backward()
    with pytest.raises(rg.ShardingError, match=r"parameter extra\.weight has a gradient already; call zero_grad\(\)"):
        model(batch(rank))
    model.extra.zero_grad()
    model(batch(rank))
    assert "extra.weight" in {slot.name for unit in engine.units for slot in unit.layout.slots}


def test_added_parameters_with_gradients(ranks: Ranks) -> None:
    ranks(2).run(_graded)


# ---- meta device
class Bare(nn.Module):
    """Cannot be made real: nothing says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def _bare(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Bare(), nn.Linear(4, 4)))
    with _refused(model, r"module 1\.0 \(Bare\) has parameters .*on the meta device but no reset_parameters\(\)"):
        rg.shard(model, 3)
    model[1][0].reset_parameters = lambda: nn.init.ones_(model[1][0].scale)
    rg.shard(model, 3)
    assert torch.equal(model[1][0].scale, torch.ones(4))
    dist.barrier()


def test_meta_module_without_reset(ranks: Ranks) -> None:
    ranks(2).run(_bare)


def test_names_of_errors() -> None:
    assert issubclass(rg.ShardingError, ValueError) and issubclass(rg.UnsupportedError, TypeError)
    for kind in (rg.ShardingError, rg.UnsupportedError, rg.DivergenceError):
        assert issubclass(kind, rg.RetrogradeError) and issubclass(kind, RuntimeError)
