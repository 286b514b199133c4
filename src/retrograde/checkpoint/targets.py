"""The tensors into which a checkpoint is loaded, and the parts of them that this rank holds."""

import contextlib
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from retrograde.checkpoint.stored import Extent, Stored
from retrograde.engine import Engine
from retrograde.layout import slot_boxes, view_box
from retrograde.parameters import ShardedParameter
from retrograde.parameters.sharded_tensor import ShardedTensor


class Held(NamedTuple):
    """A part of a tensor, and the memory in which this rank has it."""

    extent: Extent
    memory: torch.Tensor


def held_parts(tensor: torch.Tensor) -> list[Held]:
    """The parts of a tensor that this rank holds: a few boxes of a sharded one, all of a plain one."""
    if not isinstance(tensor, ShardedTensor):
        return [Held(Extent.all_of(tensor.shape), tensor.detach())]
    unit, slot, piece = tensor.unit, tensor.slot, tensor.piece  # read, or written by leave of all (leave_to_write)
    mine = unit.layout.within(slot, unit.rank)
    if mine.start >= mine.stop:
        return []
    boxes = slot_boxes(slot, mine.start, mine.stop)
    return [Held(Extent(tuple(box.offsets), tuple(box.sizes)), view_box(slot, box, piece)) for box in boxes]


@dataclass(frozen=True)
class Fill:
    """A tensor that is to be filled from a checkpoint."""

    name: str
    stored: Stored
    into: torch.Tensor

    @functools.cached_property
    def _parts(self) -> list[Held]:
        return held_parts(self.into)

    def check(self) -> None:
        for part in self._parts:
            self.stored.check(part.extent)

    @property
    def bytes(self) -> int:
        return sum(part.extent.numel * part.memory.dtype.itemsize for part in self._parts)

    def apply(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                self.stored.read(part.extent, part.memory)
        if isinstance(self.into, ShardedParameter):
            self.into.forget_writes_to_copies()


@contextlib.contextmanager
def leave_to_write(engines: Sequence[Engine]) -> Iterator[None]:
    """Allow to write shards inside, since they may not change while other ranks read them. All ranks call it together.

    To the engine this is a step of training: nobody reads during it, and all read anew after it. (Edits of parameters
    one by one would keep a copy of each for ranks that still read.)"""
    for engine in engines:
        engine.coordinator.begin_step()
    try:
        yield
    finally:
        for engine in engines:
            engine.coordinator.end_step()


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sharded parameter whose memory this tensor of a state dict shares; any other tensor is returned as it is."""
    if isinstance(tensor, ShardedTensor) and tensor.of_weights:
        return tensor.unit.leaves[tensor.place]
    return tensor


def memory_of(tensor: torch.Tensor) -> Hashable:
    """A key for a tensor's memory, equal for tensors that share it under two names, as a tied parameter does."""
    leaf = leaf_of(tensor)
    if isinstance(leaf, ShardedTensor) or leaf.numel() == 0:
        return id(leaf)
    return leaf.data_ptr(), leaf.shape, leaf.stride()


def distinct(fills: list[Fill]) -> Iterable[Fill]:
    """The fills, with only one of those of a tied parameter's several names: the last, which in torch overwrites the
    others."""
    return {memory_of(fill.into): fill for fill in fills}.values()
