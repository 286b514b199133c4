"""From parameters to shards: the memory of each unit on this rank, and how it gets its values."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograde.coordination import Coordinator
from retrograde.devices import Streams
from retrograde.engine.materialize import Initializer, materialize
from retrograde.errors import ShardingError, UnsupportedError
from retrograde.layout import Grid, Layout, Offload, Policy, UnitSpec, strides_of
from retrograde.pages import BufferPool
from retrograde.parameters import ShardedParameter
from retrograde.torch_internals import forget_weight_references, give_hooks, set_data, take_hooks
from retrograde.transport import Memory, Transport


class UnitMemory(NamedTuple):
    """A unit that is about to be: which parameters, where each will lie, and the memory for it on this rank.

    `memory` is the shard, or the whole page with the shard inside it when pages stay (or there is one shard).
    `masters` are the shard instead, where they are of another dtype than the page, or elsewhere (pages/source.py)."""

    spec: UnitSpec
    layout: Layout
    memory: torch.Tensor
    masters: torch.Tensor | None

    def shard(self, number: int) -> torch.Tensor:
        """The memory of this rank's shard, which is the one with this number."""
        if self.masters is not None:
            return self.masters
        return self.memory[self.layout.span(number)] if self._whole else self.memory

    def piece(self, place: int, shard: int) -> torch.Tensor:
        """The memory to which this rank's part of a parameter belongs."""
        return self.shard(shard)[self.layout.piece(self.layout.slots[place], shard)]

    @property
    def _whole(self) -> bool:
        return self.memory.numel() == self.layout.padded_numel


def allocate(
    specs: Sequence[UnitSpec], policy: Policy, grid: Grid, transport: Transport, pool: BufferPool, even: bool = False
) -> list[UnitMemory]:
    """Make the memory of units; values come later. `even`: all ranks' shards of a unit are equally long."""
    made = []
    for spec in specs:
        strides = [strides_of(param) for _, param in spec.params]
        shapes = [(name, param.shape) for name, param in spec.params]
        layout = Layout(shapes, spec.dtypes.page, grid.shards, strides, spec.shard_of, even)
        memory = _memory(layout, policy, grid, transport, pool.streams)
        masters = _masters(spec, memory, layout.shard_sizes[grid.shard], policy, pool.streams)
        made.append(UnitMemory(spec, layout, memory.zero_(), masters))
    return made


def _memory(layout: Layout, policy: Policy, grid: Grid, transport: Transport, streams: Streams) -> torch.Tensor:
    """Make the memory that pages are made of:
    a whole page where pages stay, else a shard, on the device or on the host."""
    if policy.offload is Offload.PARAMETERS and not streams.on_host and not policy.keeps_pages:
        return streams.crossing.pinned(layout.shard_sizes[grid.shard], layout.dtype)
    stays = policy.keeps_pages or grid.shards == 1
    numel = layout.padded_numel if stays else layout.shard_sizes[grid.shard]
    return transport.allocate(Memory.SHARD, numel, layout.dtype, streams.current())


def _masters(spec: UnitSpec, source: torch.Tensor, numel: int, policy: Policy, streams: Streams) -> torch.Tensor | None:
    """Make the memory of the masters, if they are of another dtype than pages,
    or are to be where the source is not; else None."""
    dtype = spec.dtypes.master
    on_host = policy.offload is not Offload.NOTHING or streams.on_host
    if dtype == spec.dtypes.page and on_host == (source.device.type == "cpu"):
        return None
    if on_host and not streams.on_host:
        return streams.crossing.pinned(numel, dtype).zero_()
    return streams.current().empty(numel, dtype).zero_()


def fill(
    model: nn.Module,
    made: Sequence[UnitMemory],
    shard: int,
    device: torch.device,
    sources: Mapping[int, ShardedParameter],
    init: Initializer | None,
) -> None:
    """Copy each parameter's piece into its shard and point the parameter there, a parameter at a time.

    Those on the meta device get the values of `sources`, or first ones (`init`)."""
    places = {id(param): (unit, place) for unit in made for place, (_, param) in enumerate(unit.spec.params)}
    moved = set()

    def move_in(param: nn.Parameter, value: torch.Tensor) -> None:
        unit, place = places[id(param)]
        slot = unit.layout.slots[place]
        piece = unit.piece(place, shard)
        piece.copy_(slot.flatten(value.detach())[unit.layout.within(slot, shard)])
        if id(param) not in moved:
            _point(param, slot.name, piece)
            moved.add(id(param))

    params = [param for unit in made for _, param in unit.spec.params]
    real = [param for param in params if param.device.type != "meta"]
    if any(unit.shard(shard).device != device for unit in made):
        for module in model.modules():
            forget_weight_references(module)  # they would keep parameters where they are; access.py serves them
    for param in params:
        if id(param) in sources:
            move_in(param, sources[id(param)].full_tensor())
    if any(param.device.type == "meta" for param in params):
        materialize(model, device, move_in, init)
    for param in real:
        move_in(param, param)


def _point(param: nn.Parameter, name: str, piece: torch.Tensor) -> None:
    """Make a piece of the shard the parameter's memory from now on."""
    if param.device.type == "meta":
        torch.utils.swap_tensors(param, nn.Parameter(piece, param.requires_grad))  # type: ignore[no-untyped-call]
        return
    _end_older_graphs(param, name)
    if param.device != piece.device:
        _move(param, name, piece)
        return
    other = torch.float16 if piece.dtype != torch.float16 else torch.float32
    set_data(
        param, torch.empty(0, dtype=other, device=piece.device)
    )  # the node that graphs made before hold is not ours
    set_data(param, piece)


def _move(param: nn.Parameter, name: str, piece: torch.Tensor) -> None:
    """Move a parameter to the host's memory: not every kind of device lets a tensor have memory of another kind."""
    hooks = take_hooks(param)
    try:
        torch.utils.swap_tensors(param, nn.Parameter(piece, param.requires_grad))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ShardingError(
            f"parameter {name} cannot move to the host's memory while a graph or a weak reference holds it: let go of "
            f"losses and outputs that were computed with it before rg.shard(offload=...), or shard without offload"
        ) from error
    give_hooks(param, *hooks)


def _end_older_graphs(param: nn.Parameter, name: str) -> None:
    """Refuse graphs that were recorded before the parameter was sharded. Such a graph is of no further use: what it
    saved of the parameter is about to become a piece, and its gradient would reach `.grad` without being reduced."""
    torch.autograd.graph.increment_version(param)  # autograd refuses what was saved
    if not param.requires_grad:
        return

    def refuse(grads: Any) -> None:
        raise UnsupportedError(
            f"backward through a graph that was recorded before parameter {name} was sharded: call rg.shard() first, "
            f"and the model itself before a submodule, a hook or a loss uses parameters that were added to it"
        )

    torch.autograd.graph.get_gradient_edge(param).node.register_prehook(refuse)  # dies with those graphs


SourceOf = Callable[[int], int]  # of each rank, the one whose values it takes


def make_same(tensors: Sequence[torch.Tensor], coordinator: Coordinator, rank: int, source_of: SourceOf) -> None:
    """Each rank takes the values of another, as DDP's ranks take rank 0's; those that are equal already do not travel.

    All ranks have the same number of tensors."""
    sums = [_checksum(tensor) for tensor in tensors]
    everybody = coordinator.values("values of the model", lambda: sums)
    for index, tensor in enumerate(tensors):
        if all(theirs[index] == everybody[source_of(other)][index] for other, theirs in enumerate(everybody)):
            continue
        is_source = source_of(rank) == rank
        mine: Callable[[], torch.Tensor | None] = partial(torch.clone, tensor.detach()) if is_source else lambda: None
        value = coordinator.values(f"value {index} of the model", mine)[source_of(rank)]
        assert value is not None  # a source brings one
        with torch.no_grad():
            tensor.copy_(value)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
