"""The state of optimizers over sharded parameters: which rank saved it, and whether it belongs on this one.

[Note: the state of an optimizer]
What an elementwise optimizer keeps for a sharded parameter (momentum, second moments) is sharded as the parameter is,
and `optimizer.state_dict()` has it so, under torch's own two entries. torch.distributed.checkpoint saves it in true
shapes, for any number of ranks. `torch.save` on each rank writes this rank's pieces, each with its `Origin`: which
elements of which parameter they are. `load_state_dict()` looks at it. There are four outcomes for each tensor:

- it has this rank's elements, or more (a plain run's state has the shape of the whole parameter): it is cut to them;
- it has no elements of a parameter (a step counter): it stays as it is;
- it says that the parameter's owner, another rank, keeps its state: it is refused, unless this is so here too;
- anything else is refused, before the optimizer is changed.

torch has hooks for both methods, but each optimizer has its own, and optimizers are made before and after `shard()`. So
the two methods are wrapped on torch's class, once for the process, and add a hook during the call. This hook sees the
state before users' hooks when it is saved, and after them when it is loaded.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from retrograde.errors import StateError
from retrograde.parameters.elementwise import is_elementwise
from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.ownership import (
    is_kept_by_owners,
    keep_by_owners,
    updated_elsewhere,
    updates_by_owners,
)
from retrograde.parameters.sharded_tensor import Computed, ShardedGradient, ShardedTensor, become
from retrograde.parameters.wholes import plain
from retrograde.torch_internals import NO_TORCH_FUNCTION, raw_grad, set_data, watch_optimizer_states

_ELSEWHERE = "kept by its owner"  # key in a saved state: another rank updates the parameter
_COUNTER = "step"  # torch's name for it, which its own load_state_dict treats apart as well
_NUMBERS = {_COUNTER, "mu_product", "eta", "mu"}  # torch's names for numbers about a whole parameter


class Origin(NamedTuple):
    """Which elements of which parameter a saved tensor has."""

    name: str
    rank: int
    world: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # the parameter's, None if row by row: elements are in memory order
    start: int
    stop: int

    @staticmethod
    def of(part: ShardedTensor) -> "Origin":
        unit, slot = part.unit, part.slot
        mine = unit.layout.within(slot, unit.rank)
        if mine.start == mine.stop:
            mine = slice(0, 0)  # this rank has no element of the parameter
        who = unit.grid
        return Origin(slot.name, who.rank, who.world, tuple(slot.shape), slot.strides, mine.start, mine.stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> str:
        return f"elements {self.start} to {self.stop}"

    def has(self, other: "Origin") -> bool:
        """Are all elements of `other` among the elements of this one?"""
        inside = self.start <= other.start and other.stop <= self.stop
        return self.shape == other.shape and self.strides == other.strides and (inside or other.numel == 0)

    @property
    def is_everything(self) -> bool:
        return self.numel == torch.Size(self.shape).numel()


class OptimizerState(ShardedTensor):
    """A sharded tensor that an optimizer keeps. It is pickled as this rank's piece, with its origin."""

    def _copied(self, data: torch.Tensor) -> ShardedTensor:
        return become(data, OptimizerState, self._owner, self.place, self._shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return saved_piece, (plain(self), *Origin.of(self))


class SavedPiece(torch.Tensor):
    """What `torch.load` makes of a pickled `OptimizerState`: the elements of one rank, and their origin."""

    __torch_function__ = NO_TORCH_FUNCTION
    origin: Origin

    def __deepcopy__(self, memo: dict[int, Any]) -> "SavedPiece":
        return saved_piece(self.as_subclass(torch.Tensor).clone(), *self.origin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return saved_piece, (self.as_subclass(torch.Tensor), *self.origin)


def saved_piece(elements: torch.Tensor, *origin: Any) -> SavedPiece:
    """Make a saved piece; pickled optimizer state calls this when `torch.load` reads it."""
    piece = elements.as_subclass(SavedPiece)
    piece.origin = Origin(*origin)
    return piece


torch.serialization.add_safe_globals([saved_piece])


@functools.cache
def watch_states() -> None:
    """Wrap `state_dict` and `load_state_dict` of torch's Optimizer, once for the process."""
    watch_optimizer_states(_allow_saving, _fit)


# ---- numbers about whole parameters
def numbers_in(states: Iterable[tuple[torch.Tensor, Mapping[str, object]]]) -> set[str]:
    """The names of what an optimizer keeps once for a parameter and not for each of its elements. A parameter without
    dimensions does not tell them apart: those with dimensions do, and if there is none, torch's names."""
    found = set(_NUMBERS)
    for param, state in states:
        for key, value in state.items() if param.dim() else ():
            if (shape := getattr(value, "shape", None)) is not None:
                (found.discard if len(shape) else found.add)(key)
    return found


def is_number(key: str, param: torch.Tensor, numbers: set[str]) -> bool:
    """Is what an optimizer keeps in the parameter's shape under this name no element of it, but a number of the whole?
    `numbers`: what `numbers_in` has found."""
    return key in numbers and not param.dim()


# ---- around an update of plain tensors
def sharded_states(state: dict[str, Any], leaf: ShardedParameter, numbers: set[str]) -> Iterator[OptimizerState]:
    """Before an update, make the state of a parameter sharded and yield its sharded tensors. A tensor from before the
    parameter was sharded is whole, and is cut."""
    for key, value in state.items():
        if type(value) is OptimizerState:
            yield value
        elif isinstance(value, ShardedTensor):
            value.__class__ = OptimizerState
            yield value  # type: ignore[misc]
        elif _is_whole(value, key, leaf, numbers):
            state[key] = _piece(leaf, leaf.cut(value).clone())
            yield state[key]


def adopt_new(state: dict[str, Any], leaf: ShardedParameter) -> None:
    """After an update of plain tensors, make sharded what it has added for a parameter, element by element."""
    size = leaf.piece.shape
    for key, value in state.items():
        if type(value) is torch.Tensor and value.shape == size and key != _COUNTER:
            _piece(leaf, value)


def adopt_whole(state: dict[str, Any], leaf: ShardedParameter) -> None:
    """After an update by a parameter's owner, make sharded what is kept in the parameter's shape."""
    for key, value in state.items():
        if _is_whole(value, key, leaf, _NUMBERS):
            set_data(value, leaf.slot.flatten(value))
            _piece(leaf, value)


def _piece(leaf: ShardedParameter, elements: torch.Tensor) -> OptimizerState:
    return become(elements, OptimizerState, leaf._owner, leaf.place, leaf.shape)


def _is_whole(value: Any, key: str, leaf: ShardedParameter, numbers: set[str]) -> bool:
    """Is it a plain tensor with the parameter's elements, in its shape?"""
    return type(value) is torch.Tensor and value.shape == leaf.shape and not is_number(key, leaf, numbers)


# ---- saving
def _allow_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Turn sharded state into `OptimizerState`, which can be pickled, and mark parameters whose owners keep it."""
    for param, state in optimizer.state.items():
        if not isinstance(param, ShardedParameter) or param.orphaned:
            continue  # optimizers may keep other things there too
        for value in state.values():
            if type(value) in (ShardedTensor, Computed, ShardedGradient) and value is not raw_grad(param):
                value.__class__ = OptimizerState
    if is_kept_by_owners(optimizer):
        elsewhere = updated_elsewhere(optimizer)
        for number, param in enumerate(_params(optimizer)):
            # The mark has an origin, so that a file says whose it is though nothing of the parameter is in it.
            if isinstance(param, ShardedParameter) and param in elsewhere:
                state_dict["state"][number] = {_ELSEWHERE: _piece(param, param.piece.clone())}


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


# ---- loading
def _fit(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """A state dict cut to this rank's pieces, for torch to load. The caller's dict stays as it is."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = list(_params(optimizer))
    if len(indices) != len(params):
        return None  # torch raises its own error
    fitted = dict(state_dict["state"])
    strict = is_elementwise(type(optimizer))  # other optimizers may keep tensors of any shape
    numbers = numbers_in((param, fitted.get(index, {})) for index, param in zip(indices, params, strict=True))
    for index, param in zip(indices, params, strict=True):
        for key, value in fitted.get(index, {}).items():
            if isinstance(param, ShardedParameter):
                fitted[index] = {**fitted[index], key: _own_part(value, key, param, strict, numbers)}
            elif isinstance(value, SavedPiece):
                fitted[index] = {**fitted[index], key: _whole(value, key, param)}
    if updates_by_owners(optimizer):
        keep_by_owners(optimizer)
    fitted = {index: state for index, state in fitted.items() if _ELSEWHERE not in state}
    return {**state_dict, "state": fitted}


def _own_part(value: Any, key: str, leaf: ShardedParameter, strict: bool, numbers: set[str]) -> Any:
    """This rank's elements of a saved tensor. `strict`: a plain one must have the parameter's shape or one element."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, SavedPiece):
        return _piece(leaf, _cut_saved(value, key, leaf))
    if isinstance(value, ShardedTensor):
        return value if value.cut_like(leaf) else _piece(leaf, leaf.cut(value.full_tensor()).clone())
    if _is_whole(value, key, leaf, numbers):
        return _piece(leaf, leaf.cut(value).clone())
    if value.numel() == 1 or not strict:
        return value
    here = Origin.of(leaf)
    raise StateError(
        f"{_what(key, here)} has shape {tuple(value.shape)}, not the parameter's shape {here.shape}, and does not say "
        f"whose piece it is: is it of another model?"
    )


def _cut_saved(value: SavedPiece, key: str, leaf: ShardedParameter) -> torch.Tensor:
    origin, here = value.origin, Origin.of(leaf)
    if origin.shape == here.shape and origin.strides != here.strides:
        raise StateError(
            f"{_what(key, here)} is for a parameter that lies otherwise in memory (strides {origin.strides}, here "
            f"{here.strides}; None is row by row): give the model the memory format it had before rg.shard()"
        )
    if not origin.has(here):
        raise StateError(
            f"{_what(key, here)} ({origin.elements} of {leaf.slot.numel}) was saved by rank {origin.rank} of "
            f"{origin.world}, this is rank {here.rank} of {here.world} ({here.elements}): each rank saves its own "
            f"optimizer.state_dict() and loads that one, with as many ranks as saved it; for another number of ranks "
            f"save and load it by torch.distributed.checkpoint"
        )
    elements = value.as_subclass(torch.Tensor)
    if origin.numel == here.numel:
        return elements
    first = here.start - origin.start if here.numel else 0
    return elements[first : first + here.numel].clone()


def _whole(value: SavedPiece, key: str, param: nn.Parameter) -> torch.Tensor:
    """The whole tensor for a parameter that is not sharded, if the saved piece has all of it; otherwise raise."""
    origin = value.origin
    if not origin.is_everything or origin.shape != tuple(param.shape):
        raise StateError(
            f"optimizer.load_state_dict(): {key} of parameter {origin.name} ({origin.elements}) was saved by rank "
            f"{origin.rank} of {origin.world}, and the parameter here is not sharded, of shape {tuple(param.shape)}: "
            f"call rg.shard() before load_state_dict(), on as many ranks, or use torch.distributed.checkpoint"
        )
    flat = value.as_subclass(torch.Tensor)
    return flat.view(origin.shape) if origin.strides is None else flat.as_strided(origin.shape, origin.strides)


def _what(key: str, here: Origin) -> str:
    return f"rank {here.rank}: optimizer.load_state_dict(): {key} of parameter {here.name}"
