"""`shard()`: turn a model into a sharded one, in place.

The data path from here: `find_units` says which parameters go together (layout), `allocate` and `fill` (units.py)
give each unit its memory and values on this rank, `Engine.enlist` makes units with pages and a graph of them, and
`patch` makes `module.weight` reach the page. From then on everything is driven by access and by autograd.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from retrograde.arguments import Said, check_module, differences, flag, function, instance, one_of, said, seconds
from retrograde.compiling import Services, mark_regions
from retrograde.coordination import WriteFence
from retrograde.devices import HOST, Streams, can_compute, device_of, streams_of
from retrograde.engine.copying import copied
from retrograde.engine.ddp_and_fsdp import check_no_dtensors, check_unwrapped, refuse_ddp_and_fsdp
from retrograde.engine.engine import Engine, EngineTransport
from retrograde.engine.materialize import Initializer, check_resettable
from retrograde.engine.parametrizing import refuse_parametrizations
from retrograde.engine.units import UnitMemory, allocate, fill, make_same
from retrograde.errors import ShardingError
from retrograde.layout import (
    Grid,
    Loads,
    Offload,
    Policy,
    Precision,
    Units,
    UnitSpec,
    Whole,
    find_units,
    parse_bytes,
    strides_of,
    whole_names,
)
from retrograde.parameters import ShardedParameter, refuse_pieces_outside, watch_states, watch_updates
from retrograde.parameters.access import patch, unpatched
from retrograde.transport import ProcessRanks, Ranks, Transport
from retrograde.transport.collective import CollectiveTransport
from retrograde.transport.groups import device_for, grid_of, group_of_replicas, process_group_of
from retrograde.transport.values import exchange

FindUnits = Callable[..., list[UnitSpec]]  # `find_units` of one model, and how it is sharded

_preparing = threading.Lock()
TRANSPORTS = ("auto", "collective", "one-sided")
WAIT_FOR_ARGUMENTS = 60.0  # seconds, until the argument `timeout` is known to be one


def shard(
    model: nn.Module,
    stage: int = 3,
    *,
    units: Units = "auto",
    join: int | str = 0,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    precision: Precision | str | None = None,
    reduce: str = "mean",
    exact: bool | None = None,
    resident: int | str = 0,
    offload: Offload | str | None = None,
    prefetch: bool = True,
    overlap: bool = True,
    transport: str = "auto",
    timeout: float = 60.0,
    whole: Whole = None,
    init: Initializer | None = None,
) -> Engine:
    """Shard `model` over the ranks of a process group, in place. Collective: every rank calls it.

    `units`: "auto" (repeated blocks), module classes, or a predicate; `join`: those of fewer bytes become one unit with
    the next. `precision`: "bf16" or "fp16" (modules compute in it, the optimizer updates fp32 masters), or an
    `rg.Precision`. `exact=False`, the default on accelerators: collectives bring gradients, and there the backend adds
    them up in its own order. `transport`: "collective", the default on accelerators, between hosts and with
    `exact=False`: by collectives of torch.distributed, but for what only some ranks do; "one-sided": without them.
    `resident`: bytes of pages that may stay at stage 3 beyond the one in use and the one prefetched. `offload`, of a
    model on a device: "optimizer" keeps leaves, gradients and optimizer state in the host's memory; "parameters" at
    stage 3 also pages' sources. `mesh`: of one dimension, or of two, (replicate, shard). `timeout`: seconds until a
    rank that never comes becomes a `DivergenceError`. `whole`: parameters that one rank each holds, for optimizers that
    need matrices (Muon): "matrices", "all", a list of parameters, modules or names, or a predicate of (name,
    parameter). `overlap=False`: all on the current stream. `init`: gives modules on the meta device their values, as
    `model.apply(init)` would, without `reset_parameters()`; on the accelerator, if mesh or group is for it."""
    group = _group(process_group, mesh)
    ranks = ProcessRanks(group, _connecting_time(timeout))
    how = (stage, units, join, precision, reduce, exact, resident, prefetch, overlap, transport, timeout, whole)
    options = Options(*how, offload, init)
    grid = None if mesh is None or mesh.ndim == 1 else grid_of(mesh, group)
    return shard_over(ranks, model, options, grid, home=device_for(group, mesh))


class Options(NamedTuple):
    """The arguments of `shard()` that say how, as they were given."""

    stage: int = 3
    units: Units = "auto"
    join: int | str = 0
    precision: Precision | str | None = None
    reduce: str = "mean"
    exact: bool | None = None
    resident: int | str = 0
    prefetch: bool = True
    overlap: bool = True
    transport: str = "auto"
    timeout: float = 60.0
    whole: Whole = None
    offload: Offload | str | None = None
    init: Initializer | None = None

    def policy(self, on_host: bool) -> Policy:
        by_backend = not on_host and self.transport != "one-sided"
        exact = not by_backend if self.exact is None else self.exact
        flag("overlap", self.overlap)
        one_of("transport", self.transport, TRANSPORTS, '"auto", "collective" or "one-sided"')
        if self.init is not None:
            function("init", self.init, "a function of a module, or None")
        return Policy.of(self.stage, self.resident, self.reduce, self.prefetch, self.precision, exact, self.offload)

    @property
    def overlaps(self) -> bool:
        """May streams overlap? A mistake in the argument is told when all can be told (`policy`)."""
        try:
            return flag("overlap", self.overlap)
        except ShardingError:
            return True

    def by_collectives(self, ranks: ProcessRanks, streams: Streams) -> bool:
        """Are collectives to be used? This says what "auto" comes to."""
        wanted = self.asks_backend or ranks.should_call(streams)
        return self.transport == "collective" or (self.transport == "auto" and wanted)

    @property
    def asks_backend(self) -> bool:
        """Was `exact=False` given? A mistake in the argument is told when all can be told (`policy`)."""
        try:
            return self.exact is not None and not flag("exact", self.exact)
        except ShardingError:
            return False

    def said(self, policy: Policy, grid: Grid) -> list[Said]:
        """What must be the same on all ranks."""
        return [
            said("mesh", [list(row) for row in grid.rows], grid.rows),
            said("stage", self.stage, int(self.stage)),
            said("reduce", self.reduce, policy.mean),
            said("exact", self.exact, policy.exact),
            said("transport", self.transport, str(self.transport)),
            said("precision", self.precision, policy.precision.meaning),
            said("resident", self.resident, float(policy.resident)),
            said("prefetch", self.prefetch, policy.prefetch),
            said("offload", self.offload, policy.offload.value),
        ]


def shard_over(
    ranks: Ranks,
    model: nn.Module,
    options: Options,
    grid: Grid | None = None,
    sources: Mapping[int, ShardedParameter] = MappingProxyType({}),
    home: torch.device = HOST,
) -> Engine:
    """`shard()` over any kind of ranks: processes, threads, or imagined ones (transport/).

    `grid`: who holds which shard; by default all hold the model together. `sources`: whose values parameters on meta
    get, by their identity; others draw theirs. `home`: where a model goes that is all on meta."""
    grid = grid or Grid.line(ranks.rank, ranks.world)
    streams = streams_of(_device_of(model, home), options.overlaps)
    fence = WriteFence(streams)
    start = _start(ranks, fence, streams, options)
    first = start.transport
    with first.shared_fate("shard()"):
        first.timeout = seconds("timeout", options.timeout)
        policy = options.policy(streams.on_host)
        arguments = options.said(policy, grid)
        _check_sums(options, ranks)
        find = _finding(model, options, policy, grid)
        specs = _units_of(model, find, streams.device)
        check_resettable(model, sources, options.init)
        _prepare_torch()
        shard_copy = partial(_shard_copy, ranks, _for_copies(options, model), grid, streams.device)
    _check_same(first.rank, exchange(first, "shard()", _description(specs, arguments)))
    engine = Engine(
        model,
        policy,
        streams,
        start.open(grid.rows),
        grid,
        fence,
        lambda engine: _grow(engine, _added(model, find, streams.device), options.init),
        lambda memo: copied(model, memo, policy.precision, shard_copy),
    )
    _enlist(engine, specs, sources, options.init)
    return engine


class _Start(NamedTuple):
    """What ranks have before they agree on how to shard: a transport to agree over, and what makes the engine's own one
    of it. `open` gets the ranks of each replica, by shard."""

    transport: Transport
    open: Callable[[Sequence[Sequence[int]]], EngineTransport]


def _start(ranks: Ranks, fence: WriteFence, streams: Streams, options: Options) -> _Start:
    """Make the transport to agree over. A mistake in an argument is told when all can be told."""
    if isinstance(ranks, ProcessRanks) and options.by_collectives(ranks, streams):
        start = ranks.collective_start(fence, streams, WAIT_FOR_ARGUMENTS)
        return _Start(start.aside, start.open)
    transport = ranks.transport(fence, streams, WAIT_FOR_ARGUMENTS)
    return _Start(transport, lambda rows: transport)


def _device_of(model: nn.Module, home: torch.device) -> torch.device:
    """The device of the model's parameters.
    What is no model, or is where nothing can be computed, is told when all can be told."""
    device = device_of(model.parameters(), home) if isinstance(model, nn.Module) else HOST
    return device if can_compute(device) else HOST


def _finding(model: nn.Module, options: Options, policy: Policy, grid: Grid) -> FindUnits:
    least = parse_bytes(options.join, "join")
    loads = Loads(grid.shards)
    return partial(_find, loads, model, options.units, least, precision=policy.precision, whole=options.whole)


def _find(loads: Loads, *args: Any, **kwargs: Any) -> list[UnitSpec]:
    """Find units, and choose owners, who are balanced over all that was found so far."""
    return loads.assign(find_units(*args, **kwargs))


def _for_copies(options: Options, model: nn.Module) -> Options:
    """The options for a copy of this model:
    what they say of its own parameters and modules they say by names, which the copy has too."""
    whole = options.whole
    by_rule = whole is None or isinstance(whole, str) or (callable(whole) and not isinstance(whole, nn.Module))
    return options if by_rule else options._replace(whole=whole_names(model, whole))


def _shard_copy(
    ranks: Ranks,
    options: Options,
    grid: Grid,
    home: torch.device,
    made: nn.Module,
    sources: Mapping[int, ShardedParameter],
) -> Engine:
    return shard_over(ranks, made, options, grid, sources, home)


def _units_of(model: nn.Module, find: FindUnits, device: torch.device) -> list[UnitSpec]:
    """The units of a model that can be sharded; raises if it cannot."""
    check_module("model", model)
    _check_unsharded(model)
    check_unwrapped(model)
    specs = find()
    if not specs:
        raise ShardingError(f"{type(model).__name__} has no parameters to shard")
    _check_plain(specs, device)
    return specs


def _prepare_torch() -> None:
    """Prepare torch's own functions for sharded parameters, once for the process, of which ranks may be threads."""
    with _preparing:
        watch_updates()
        watch_states()
        refuse_pieces_outside()
        refuse_ddp_and_fsdp()
        refuse_parametrizations()


def _connecting_time(timeout: float) -> float:
    """How long to wait for the other ranks. One with a mistake in `timeout` connects too, to tell them."""
    try:
        return seconds("timeout", timeout)
    except ShardingError:
        return WAIT_FOR_ARGUMENTS


def _grow(engine: Engine, added: list[UnitSpec], init: Initializer | None) -> None:
    """Shard parameters that were added. Nothing of the model is touched before all ranks agree that they may."""
    if added:
        check_resettable(engine.model, (), init)
        told = engine.coordinator.values("shard()", lambda: _description(added, ()))
        _check_same(engine.transport.rank, told)
    _enlist(engine, added, MappingProxyType({}), init)


def _enlist(
    engine: Engine, specs: list[UnitSpec], sources: Mapping[int, ShardedParameter], init: Initializer | None
) -> None:
    """Make units of plain parameters, which are the same on all ranks."""
    at_first = not engine.units
    if specs:
        with engine.transport.shared_fate("allocating units"):
            even = isinstance(engine.transport, CollectiveTransport)  # what backends take
            made = allocate(specs, engine.policy, engine.grid, engine.transport, engine.pages, even)
        _make_same_values(engine, specs, with_buffers=at_first)
        with engine.transport.shared_fate("making shards of parameters"):
            drawn = [unit for unit in made if any(param.device.type == "meta" for _, param in unit.spec.params)]
            fill(engine.model, made, engine.grid.shard, engine.device, sources, init)
        _make_same_replicas(engine, drawn)
        engine.enlist(made)
    for module in engine.model.modules():
        if unpatched(module) or (at_first and (module is engine.model or engine.cast_around(module))):
            patch(module, engine)
    services = Services(engine.saved, engine.grow, engine.coordinator.pass_fence)
    mark_regions(engine.model, specs, services)


def _make_same_values(engine: Engine, specs: list[UnitSpec], with_buffers: bool) -> None:
    """Give all ranks rank 0's values. Buffers take part at first only: statistics are each rank's own later."""
    tensors: list[torch.Tensor] = [param for spec in specs for _, param in spec.params]
    if with_buffers:
        tensors += engine.model.buffers()
    real = [tensor for tensor in tensors if tensor.device.type != "meta"]
    if engine.transport.world > 1 and real:
        make_same(real, engine.coordinator, engine.transport.rank, lambda rank: 0)


def _make_same_replicas(engine: Engine, made: Sequence[UnitMemory]) -> None:
    """Where each rank has drawn values itself, let replicas take those of the first one, whatever their seeds are."""
    if engine.grid.replicas > 1 and made:
        shards = [unit.shard(engine.grid.shard) for unit in made]
        make_same(shards, engine.coordinator, engine.transport.rank, engine.grid.first_holder)


def _added(model: nn.Module, find: FindUnits, device: torch.device) -> list[UnitSpec]:
    """Find units of the parameters that came after `shard()` (LoRA adapters, a new head)."""
    check_no_dtensors(model)
    fresh = find(wanted=lambda param: not isinstance(param, ShardedParameter))
    _check_plain(fresh, device)
    return [spec._replace(name=f"{spec.name}+{len(spec.params)} added") for spec in fresh]


def _group(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if process_group is not None and mesh is not None:
        raise ShardingError("give process_group or mesh, not both")
    if process_group is not None:
        fix = "a group of torch.distributed that this rank is in"
        instance("process_group", process_group, dist.ProcessGroup, "is not a process group", fix)
    if mesh is not None:
        fix = "a DeviceMesh of one dimension, such as mesh['dp'], or of two, (replicate, shard)"
        instance("mesh", mesh, DeviceMesh, "is not a device mesh", fix)
        if mesh.ndim != 1:
            return group_of_replicas(mesh, "mesh", ShardingError)
    ranks = process_group if mesh is None else mesh
    return process_group_of(ranks, "mesh", "mesh['dp']", ShardingError)


def _check_sums(options: Options, ranks: Ranks) -> None:
    """Refuse collectives, and sums by the backend, if they are asked for where they cannot be."""
    if (options.asks_backend or options.transport == "collective") and not isinstance(ranks, ProcessRanks):
        raise ShardingError(
            f"exact=False and transport='collective' cannot be used over {type(ranks).__name__}: collectives are "
            f"between processes; give neither"
        )
    if options.asks_backend and options.transport == "one-sided":
        raise ShardingError(
            "exact=False with transport='one-sided' cannot be used: the backend adds up by collectives; give "
            "exact=True, or transport='collective'"
        )


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


def _check_plain(specs: list[UnitSpec], device: torch.device) -> None:
    for name, param in (named for spec in specs for named in spec.params):
        if not can_compute(param.device) and param.device.type != "meta":
            raise ShardingError(
                f"parameter {name} is on {param.device}, which is neither the CPU nor torch.accelerator's device; move "
                f"the model to one of them, or make it on meta"
            )
        if param.device != device and param.device.type != "meta":
            raise ShardingError(
                f"parameter {name} is on {param.device} and the model's first one on {device}; a sharded model is on "
                f"one device: move all of it there"
            )
        if param.grad is not None:
            raise ShardingError(f"parameter {name} has a gradient already; call zero_grad() before it is sharded")


def _description(specs: list[UnitSpec], arguments: Sequence[Said]) -> list[list[str]]:
    """What this rank is about to shard, and how."""
    meanings = [one.meaning for one in arguments]
    words = [one.words for one in arguments]
    return [meanings, words, [_described(name, param, spec) for spec in specs for name, param in spec.params]]


def _check_same(rank: int, told: list[list[list[str]]]) -> None:
    """Fail unless all ranks shard the same model in the same way; say what differs, by name."""
    if text := differences([list(map(Said, theirs[0], theirs[1])) for theirs in told]):
        raise ShardingError(f"rank {rank}: shard() has different arguments: {text}; give the same on every rank")
    everybody = [theirs[2] for theirs in told]
    for other, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            odd = sorted({*theirs} ^ {*everybody[0]}) or ["the order of parameters"]
            raise ShardingError(
                f"rank {rank}: the model on rank {other} differs from that on rank 0 in "
                f"{', '.join(odd[:6])}; build the same model with the same arguments on every rank"
            )


def _described(name: str, param: nn.Parameter, spec: UnitSpec) -> str:
    strides = strides_of(param)
    memory = "" if strides is None else f" with strides {strides}"
    return f"{name}{list(param.shape)} {param.dtype}{memory} in unit {spec.name}"
