"""`shard()`: turn a model into a sharded one, in place.

The data path from here: `find_units` says which parameters go together (layout), `_make` gives each unit its
memory on this rank, `Engine.enlist` connects pages (residency) and gradients (reduction), and `patch` makes
`module.weight` reach the page. From then on everything is driven by access and by autograd.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from retrograde.arguments import Said, check_module, differences, instance, said, seconds
from retrograde.compiling import mark_regions
from retrograde.engine.ddp_and_fsdp import check_unwrapped, refuse_ddp_and_fsdp
from retrograde.engine.engine import Engine
from retrograde.engine.growth import growth
from retrograde.engine.materialize import check_resettable, materialize
from retrograde.engine.parametrizing import refuse_parametrizations
from retrograde.errors import ShardingError, UnsupportedError
from retrograde.layout import Layout, Policy, Precision, Units, UnitSpec, find_units, parse_bytes, strides_of
from retrograde.pages import Unit, set_data
from retrograde.parameters import ShardedParameter, refuse_pieces_outside, serve_initializers, watch_states, watch_steps
from retrograde.parameters.access import patch, unpatched
from retrograde.transport import Connections, Station
from retrograde.transport.groups import process_group_of

WAIT_FOR_ARGUMENTS = 60.0  # seconds, until the argument `timeout` is known to be one


def shard(
    model: nn.Module,
    stage: int = 3,
    *,
    units: Units = "auto",
    join: int | str = 0,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    reduce: str = "mean",
    exact: bool = True,
    resident: int | str = 0,
    prefetch: bool = True,
    timeout: float = 60.0,
) -> Engine:
    """Shard `model` over the ranks of a process group, in place. Collective: every rank calls it.

    `units`: "auto" (repeated blocks), module classes, or a predicate; `join`: those of fewer bytes become one unit with
    the next. `precision`: the dtype in which gradients travel; `exact=False`: the backend adds them up in its own order
    when a backward has ended. `resident`: bytes of pages that may stay at stage 3
    beyond the one in use and the one being prefetched. `timeout`: seconds after which waiting for a rank that never
    comes, here or later, becomes a `DivergenceError` on every rank that waits.
    """
    ranks = Connections.of(_group(process_group, mesh), _connecting_time(timeout))
    station = Station(ranks, WAIT_FOR_ARGUMENTS)
    with station.shared_fate("shard()"):
        station.timeout = seconds("timeout", timeout)
        check_module("model", model)
        policy = Policy.of(stage, resident, reduce, prefetch, precision, exact)
        arguments = [
            said("stage", stage, int(stage)),
            said("reduce", reduce, policy.mean),
            said("exact", exact, policy.exact),
            said("precision", precision, policy.wire),
            said("resident", resident, float(policy.resident)),
            said("prefetch", prefetch, policy.prefetch),
        ]
        _check_unsharded(model)
        check_unwrapped(model)
        least = parse_bytes(join, "join")
        specs = find_units(model, units, least)
        if not specs:
            raise ShardingError(f"{type(model).__name__} has no parameters to shard")
        _check_plain(specs)
        watch_steps()
        watch_states()
        serve_initializers()
        refuse_pieces_outside()
        refuse_ddp_and_fsdp()
        refuse_parametrizations()
        engine = Engine(model, policy, station)
    engine.grow = growth(lambda: _enlist(engine, _added(model, units, least)))
    _enlist(engine, specs, arguments)
    return engine


def _connecting_time(timeout: float) -> float:
    """For how long to wait for the other ranks. One with a mistake in `timeout` connects too, to tell them."""
    try:
        return seconds("timeout", timeout)
    except ShardingError:
        return WAIT_FOR_ARGUMENTS


def _enlist(engine: Engine, specs: list[UnitSpec], arguments: Sequence[Said] = ()) -> None:
    """Make units of plain parameters. Nothing of the model is touched before all ranks agree that they may."""
    first = len(engine.units)
    if specs:
        with engine.station.shared_fate("making room for units"):
            made = [_make(first + index, spec, engine.policy, engine.station.mesh) for index, spec in enumerate(specs)]
        _check_same(engine, specs, arguments)
        check_resettable(engine.model)
        _fill(engine, specs, made)
        engine.enlist(made)
    for module in engine.model.modules():
        if unpatched(module) or (module is engine.model and not first):
            patch(module, engine)
    mark_regions(engine.model, specs, engine.saved, engine.grow)


def _added(model: nn.Module, units: Units, least: float) -> list[UnitSpec]:
    """Parameters that came after `shard()` (LoRA adapters, a new head)."""
    fresh = find_units(model, units, least, lambda param: not isinstance(param, ShardedParameter))
    _check_plain(fresh)
    return [spec._replace(name=f"{spec.name}+{len(spec.params)} added") for spec in fresh]


def _group(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if process_group is not None and mesh is not None:
        raise ShardingError("give process_group or mesh, not both")
    if process_group is not None:
        fix = "a group of torch.distributed that this rank is in"
        instance("process_group", process_group, dist.ProcessGroup, "is not a process group", fix)
    if mesh is not None:
        fix = "a DeviceMesh of one dimension, such as mesh['dp']"
        instance("mesh", mesh, DeviceMesh, "is not a device mesh", fix)
    ranks = process_group if mesh is None else mesh
    return process_group_of(ranks, "mesh", "mesh['dp']", ShardingError)


def _check_unsharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ShardingError(f"module {name}: max_norm edits rows that other ranks have; scale rows after the step")
    params = dict(model.named_parameters())
    if sharded := [name for name, param in params.items() if isinstance(param, ShardedParameter)]:
        if len(sharded) == len(params):
            raise ShardingError(f"{type(model).__name__} is already sharded; keep the engine of the first shard() call")
        raise ShardingError(
            f"parameter {sharded[0]} already belongs to another engine; a parameter has one owner: shard the model "
            f"that contains both users of it, once"
        )


def _check_plain(specs: list[UnitSpec]) -> None:
    for name, param in (named for spec in specs for named in spec.params):
        if param.device.type not in ("cpu", "meta"):
            raise ShardingError(f"parameter {name} is on {param.device}; this version wants it on the CPU or on meta")
        if param.grad is not None:
            raise ShardingError(f"parameter {name} has a gradient already; call zero_grad() before it is sharded")


def _check_same(engine: Engine, specs: list[UnitSpec], arguments: Sequence[Said]) -> None:
    """All ranks must shard the same model in the same way; say what differs, by name."""
    meanings = [one.meaning for one in arguments]
    words = [one.words for one in arguments]
    mine = [_described(name, param, spec) for spec in specs for name, param in spec.params]
    told = engine.reducer.council.values("shard()", lambda: [meanings, words, mine])
    if text := differences([list(map(Said, theirs[0], theirs[1])) for theirs in told]):
        raise ShardingError(
            f"rank {engine.station.mesh.rank}: shard() has different arguments: {text}; give the same on every rank"
        )
    everybody = [theirs[2] for theirs in told]
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            odd = sorted({*theirs} ^ {*everybody[0]}) or ["the order of parameters"]
            raise ShardingError(
                f"rank {engine.station.mesh.rank}: the model on rank {rank} differs from that on rank 0 in "
                f"{', '.join(odd[:6])}; build the same model with the same arguments on every rank"
            )


def _described(name: str, param: nn.Parameter, spec: UnitSpec) -> str:
    strides = strides_of(param)
    memory = "" if strides is None else f" with strides {strides}"
    return f"{name}{list(param.shape)} {param.dtype}{memory} in unit {spec.name}"


def _make(index: int, spec: UnitSpec, policy: Policy, ranks: Connections) -> Unit:
    """Allocate a unit on this rank; values come later."""
    first = spec.params[0][1]
    strides = [strides_of(param) for _, param in spec.params]
    layout = Layout([(name, param.shape) for name, param in spec.params], first.dtype, ranks.world, strides)
    device = torch.device("cpu") if first.device.type == "meta" else first.device
    whole = policy.keeps_pages or ranks.world == 1
    home = torch.zeros(layout.padded_numel if whole else layout.shard_numel, dtype=layout.dtype, device=device)
    return Unit(index, spec.name, layout, [param for _, param in spec.params], home, ranks.rank)


def _fill(engine: Engine, specs: list[UnitSpec], units: list[Unit]) -> None:
    """Copy each parameter's piece into its shard and point the parameter there, a parameter at a time."""
    places = {id(param): (unit, index) for unit in units for index, param in enumerate(unit.leaves)}

    def settle(param: nn.Parameter, value: torch.Tensor) -> None:
        unit, index = places[id(param)]
        slot, rank = unit.layout.slots[index], unit.rank
        piece = unit.shard[unit.layout.piece(slot, rank)]
        piece.copy_(slot.flatten(value.detach())[unit.layout.within(slot, rank)])
        if param.device.type == "meta":
            torch.utils.swap_tensors(param, nn.Parameter(piece, param.requires_grad))  # type: ignore[no-untyped-call]
        else:
            _end_older_graphs(param, slot.name)
            other = torch.float16 if piece.dtype != torch.float16 else torch.float32
            set_data(param, torch.empty(0, dtype=other))  # the node that graphs made before hold is not ours
            set_data(param, piece)

    params = [param for spec in specs for _, param in spec.params]
    real = [param for param in params if param.device.type != "meta"]
    buffers = () if engine.units else engine.model.buffers()  # at first only: statistics are each rank's own later
    _same_values(engine, [*real, *(b for b in buffers if b.device.type != "meta")])
    for param in real:
        settle(param, param)
    if len(real) < len(params):
        materialize(engine.model, settle)


def _end_older_graphs(param: nn.Parameter, name: str) -> None:
    """A graph recorded before the parameter was sharded is of no further use, and must not run: what it saved of the
    parameter is about to become a piece, and its gradient would reach `.grad` without being reduced."""
    torch.autograd.graph.increment_version(param)  # autograd refuses what was saved
    if not param.requires_grad:
        return

    def refuse(grads: Any) -> None:
        raise UnsupportedError(
            f"backward through a graph that was recorded before parameter {name} was sharded: call rg.shard() first, "
            f"and the model itself before a submodule, a hook or a loss uses parameters that were added to it"
        )

    torch.autograd.graph.get_gradient_edge(param).node.register_prehook(refuse)  # dies with those graphs


def _same_values(engine: Engine, tensors: list[torch.Tensor]) -> None:
    """Rank 0's values are everybody's, as in DDP; nothing travels when they are equal already."""
    mesh = engine.station.mesh
    if mesh.world == 1 or not tensors:
        return
    sums = [zlib.crc32(bytes(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())) for t in tensors]
    everybody = engine.reducer.council.values("values of the model", lambda: sums)
    for index, tensor in enumerate(tensors):
        if any(other[index] != everybody[0][index] for other in everybody):
            of_rank_0 = partial(torch.clone, tensor.detach()) if mesh.rank == 0 else lambda: None
            value = engine.reducer.council.values(f"value {index} of the model", of_rank_0)[0]
            assert value is not None  # rank 0 brings one
            with torch.no_grad():
                tensor.copy_(value)
