"""The state of optimizers over sharded parameters: who saved it, and whether it belongs here.

[Note: the state of pieces]
What an optimizer keeps for a sharded parameter (momentum, second moments) is a piece, as the parameter is. In a file
it is a plain vector, and nothing of it says which elements of the parameter it is for: rank 0's would load on rank 1
wherever the two have the same size. So `optimizer.state_dict()` says it, beside torch's own two entries:

    {"state": {0: {"exp_avg": ...}}, "param_groups": [...], "retrograde": {0: {"name": "head.weight", "rank": 0, ...}}}

and `load_state_dict()` looks at it. There are three outcomes for each tensor of a state:

- it has this rank's elements, or more: it is cut to them. A plain run's state has the shape of the whole parameter;
- it has no elements (a step counter): it stays as it is;
- anything else is refused, before the optimizer is changed.

torch has hooks for both methods, but on each optimizer, and optimizers are made before and after `shard()`. So the two
methods are wrapped on torch's class, once for the process, and add a hook for the time of the call: ours sees the state
before users' own hooks when it is saved, and after them when it is loaded.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from retrograde.errors import StateError
from retrograde.parameters.pieces import OptimizerState, Piece, ShardedGradient, ShardedParameter
from retrograde.torch_internals import raw_grad, watch_optimizer_states, without_torch_function

ENTRY = "retrograde"  # of a state dict: index of a parameter -> whose piece of it the state is for
_COUNTER = "step"  # torch's name, which its own load_state_dict treats apart as well


class Origin(NamedTuple):
    """Which elements of which parameter the tensors of a saved state are for."""

    name: str
    rank: int
    world: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # of the parameter, if it does not lie row by row: elements are in memory order
    start: int
    stop: int

    @staticmethod
    def of(leaf: ShardedParameter) -> "Origin":
        layout, slot, rank = leaf.unit.layout, leaf.slot, leaf.unit.rank
        mine = layout.within(slot, rank)
        if mine.start == mine.stop:
            mine = slice(0, 0)  # a rank that has nothing of it
        return Origin(slot.name, rank, layout.world, tuple(slot.shape), slot.strides, mine.start, mine.stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> str:
        return f"elements {self.start} to {self.stop}"

    def has(self, other: "Origin") -> bool:
        """Are all elements of `other` among these?"""
        inside = self.start <= other.start and other.stop <= self.stop
        return self.memory == other.memory and (inside or other.numel == 0)

    @property
    def memory(self) -> tuple[Any, Any]:
        return self.shape, self.strides

    @property
    def is_everything(self) -> bool:
        return self.numel == torch.Size(self.shape).numel()


@functools.cache
def watch_states() -> None:
    """Wrap the two methods, once for the process."""
    watch_optimizer_states(_say_whose, _fit)


def adopt_state(optimizer: Optimizer, leaf: ShardedParameter) -> None:
    """Before a step: what an optimizer keeps for a parameter becomes a piece, whose norm is the whole's (LAMB).

    The state of one that has stepped before its parameter was sharded is that of the whole, and is cut."""
    state = optimizer.state.get(leaf, {})  # not [leaf], which would make an entry
    for key, value in state.items():
        if type(value) is not torch.Tensor or (key == _COUNTER and value.dim() == 0):
            continue
        if value.shape == leaf.shape:
            state[key] = leaf.like(value, OptimizerState)
        elif _is_whole(value, key, leaf.slot.shape):
            state[key] = leaf.like(leaf.piece_of(value).clone(), OptimizerState)


def _is_whole(value: torch.Tensor, key: str, shape: torch.Size) -> bool:
    """A parameter without dimensions has a state that looks like a counter."""
    return value.shape == shape and (len(shape) > 0 or key != _COUNTER)


# ---- saving
def _say_whose(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    indices = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    origins = {
        index: Origin.of(param)._asdict()  # a dict: torch.load(weights_only=True) knows no classes of ours
        for index, param in zip(indices, _params(optimizer), strict=True)
        if isinstance(param, ShardedParameter) and not param.orphaned
    }
    if origins:
        state_dict[ENTRY] = origins
        _allow_saving(optimizer)


def _allow_saving(optimizer: Optimizer) -> None:
    """Pieces are not pickled, but for these."""
    for param, state in optimizer.state.items():
        if not isinstance(param, ShardedParameter):
            continue  # optimizers may keep other things there too
        for value in state.values():
            if type(value) in (Piece, ShardedGradient) and value is not raw_grad(param):
                value.__class__ = OptimizerState


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


# ---- loading
def _fit(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The state cut to this rank's pieces. The caller's dict stays as it is."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = list(_params(optimizer))
    if len(indices) != len(params):
        return None  # torch says so in its own words
    if ENTRY not in state_dict and not any(isinstance(param, ShardedParameter) for param in params):
        return None  # nothing of ours
    origins = {index: Origin(**origin) for index, origin in state_dict.get(ENTRY, {}).items()}
    fitted = dict(state_dict["state"])
    for index, param in zip(indices, params, strict=True):
        if index not in fitted:
            continue
        origin = origins.get(index)
        if isinstance(param, ShardedParameter):
            fitted[index] = {key: _own_part(value, key, param, origin) for key, value in fitted[index].items()}
        elif origin is not None:
            fitted[index] = {key: _whole(value, key, param, origin) for key, value in fitted[index].items()}
    return {**state_dict, "state": fitted}


def _own_part(value: Any, key: str, leaf: ShardedParameter, origin: Origin | None) -> Any:
    """This rank's elements of a saved tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    here = Origin.of(leaf)
    if origin is not None and value.shape == (origin.numel,):
        if origin.shape == here.shape and origin.strides != here.strides:
            raise StateError(
                f"{_what(key, here)} is for a parameter that lies otherwise in memory (strides {origin.strides}, here "
                f"{here.strides}; None is row by row): give the model the memory format it had before rg.shard()"
            )
        if not origin.has(here):
            raise StateError(
                f"{_what(key, here)} ({origin.elements} of {leaf.slot.numel}) was saved by rank {origin.rank} of "
                f"{origin.world}, this is rank {here.rank} of {here.world} ({here.elements}): each rank saves its own "
                f"optimizer.state_dict() and loads that one, with as many ranks as saved it"
            )
        if origin.numel == here.numel:
            return value
        first = here.start - origin.start if here.numel else 0
        return _vector(value)[first : first + here.numel].clone()
    if _is_whole(value, key, leaf.slot.shape):
        return leaf.piece_of(value).clone()
    if value.numel() == 1:
        return value
    raise StateError(
        f"{_what(key, here)} has shape {tuple(value.shape)}, neither the parameter's shape {here.shape} nor that of a "
        f'piece whose origin is known: is it of another model, or has the entry "{ENTRY}" been left out, by which '
        f"optimizer.state_dict() says whose pieces its tensors are? Load the dict as it was returned"
    )


def _whole(value: Any, key: str, param: nn.Parameter, origin: Origin) -> Any:
    """A saved piece for a parameter that is not sharded: one that is all of it will do."""
    if not isinstance(value, torch.Tensor) or value.shape != (origin.numel,):
        return value
    if not origin.is_everything or origin.shape != tuple(param.shape):
        raise StateError(
            f"optimizer.load_state_dict(): {key} of parameter {origin.name} ({origin.elements}) was saved by rank "
            f"{origin.rank} of {origin.world}, and the parameter here is not sharded, of shape {tuple(param.shape)}: "
            f"call rg.shard() before load_state_dict(), on as many ranks"
        )
    flat = _vector(value)
    return flat.view(origin.shape) if origin.strides is None else flat.as_strided(origin.shape, origin.strides)


def _vector(value: torch.Tensor) -> torch.Tensor:
    """Also of a piece, which has rows of its own (parameters/pieces.py)."""
    with without_torch_function():
        return value.as_subclass(torch.Tensor)


def _what(key: str, here: Origin) -> str:
    return f"rank {here.rank}: optimizer.load_state_dict(): {key} of parameter {here.name}"
