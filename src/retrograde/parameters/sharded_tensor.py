"""Sharded tensors: what is computed from parameters and gradients, gradients themselves, views of parameters.

[Note: sharded tensors]
After sharding, a parameter is still the same `nn.Parameter` object. Its memory is this rank's piece of the shard, in
one dimension, and so is its gradient's; its shape is the parameter's. torch asks `__torch_function__` what a function
of it means: routes.py has the table, handlers.py serves it. Code that works element by element (most optimizers,
clipping by value) computes with pieces; code that reads all of a tensor gets the answer for all of it, on every rank;
in a computation that autograd records, a parameter is its full tensor.

Full tensors (`module.weight`) do not come through here, so forward and backward pay nothing.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from retrograde.errors import UnsupportedError
from retrograde.pages import Watched
from retrograde.parameters.checkpointing import Checkpointable
from retrograde.parameters.copied_views import CopiedView, check_views
from retrograde.parameters.handlers import serve
from retrograde.parameters.owner import Owner
from retrograde.parameters.wholes import plain, whole
from retrograde.torch_internals import clip_together, set_data, without_torch_function


class ShardedTensor(Checkpointable, Watched):
    """A tensor of which each rank holds a piece."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if CopiedView in types:
            check_views((*args, *(kwargs or {}).values()))
        return serve(func, args, kwargs)

    def full_tensor(self) -> torch.Tensor:
        return whole(self, "the whole")

    def derive(self, data: torch.Tensor) -> "ShardedTensor":
        return become(data, Computed, self._owner, self.place, self._shape)

    def reshaped(self, data: torch.Tensor, shape: torch.Size) -> "ShardedTensor":
        return become(data, type(self), self._owner, self.place, shape)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it here, since torch does not ask `__torch_function__` about it."""
        raise UnsupportedError(f"{self.called}.set_(): its memory is part of a shard; use p.data = value or copy_")

    def detach_(self) -> Any:
        return super().detach_() if self.requires_grad else self  # torch refuses detach_() for any view

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor without its values, of which this rank has only some."""
        if self.orphaned:
            return f"{type(self).__name__}(shape={tuple(self._shape)}, of a model that is gone)"
        unit, slot = self.unit, self.slot
        mine = unit.layout.within(slot, unit.rank)
        held = f"elements {mine.start} to {mine.stop}" if mine.start < mine.stop else "nothing of it"
        return (
            f"{type(self).__name__}({slot.name}, shape={tuple(self._shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad}, rank {unit.grid.rank} of {unit.grid.world} has {held})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle a piece: a file would not say of what it is one. With one rank only, pickle the whole."""
        if self.unit.layout.world > 1:
            raise UnsupportedError(
                f"{self.called}: pickling or saving this rank's piece of it, as if it were all of it. Save "
                f"model.state_dict(), p.full_tensor(), p.grad.full_tensor() or optimizer.state_dict(); each rank's own "
                f"elements by torch.distributed.checkpoint.save(), or as p.local, which is plain"
            )
        return self.put_together([plain(self)]).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Make a sharded tensor with memory of its own, in no graph."""
        if id(self) not in memo:
            memo[id(self)] = self._copied(plain(self))
        return cast(torch.Tensor, memo[id(self)])

    def _copied(self, data: torch.Tensor) -> "ShardedTensor":
        return self.derive(data)


T = TypeVar("T", bound=ShardedTensor)


def turn(tensor: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Change the class of a tensor, which stays the same object."""
    tensor.__class__ = cls


def become(data: torch.Tensor, cls: type[T], owner: "weakref.ref[Owner]", place: int, shape: torch.Size) -> T:
    """Make `data`, a rank's piece, a sharded tensor, in place."""
    turn(data, cls)
    made = cast(T, data)
    made._owner = owner
    made.place = place
    made._shape = shape
    return made


class Computed(ShardedTensor):
    """A sharded tensor that was computed element by element and shares its memory with nothing: a view makes it whole.

    So a write through the view (`update = grad * 2; update.T.div_(2); update[0].zero_()`) writes to the tensor."""

    passing = True

    def become_whole(self) -> None:
        full = whole(self, "a view")
        with without_torch_function():
            set_data(self, full)
        turn(self, torch.Tensor)

    def reshaped(self, data: torch.Tensor, shape: torch.Size) -> ShardedTensor:
        """Return the same memory under another shape. Since two tensors now share it, both stay sharded."""
        turn(self, ShardedTensor)
        return become(data, ShardedTensor, self._owner, self.place, shape)


class ParameterView(ShardedTensor):
    """Memory of a parameter (`p.data`, `p.detach()`, `p.view(-1)`): writing to it writes the parameter."""

    of_weights = True

    def full_tensor(self) -> torch.Tensor:
        if not self.unit.has_masters:
            return self.shown()
        return self.owner.masters(self.place).reshape(self._shape)

    def shown(self) -> torch.Tensor:
        return self.owner.shown(self.place).detach().reshape(self._shape)

    def reshaped(self, data: torch.Tensor, shape: torch.Size) -> ShardedTensor:
        return cast(ShardedTensor, self.unit.leaves[self.place]).reshaped(data, shape)

    def prepare_to_be_loaded(self) -> None:
        """Get memory of its own for what is read from a checkpoint, until `load_state_dict()` passes the fence."""
        with without_torch_function():
            set_data(self, self.clone())
        turn(self, ShardedTensor)


class ShardedGradient(ShardedTensor):
    """What `p.grad` is: this rank's piece of the reduced gradient, in the parameter's shape."""

    of_gradients = True


clip_together(ShardedGradient)  # clipping then takes one meeting


def classes_of_sharded_tensors() -> list[type[ShardedTensor]]:
    """Every class of sharded tensors: `ShardedTensor` and all its subclasses."""
    found = [ShardedTensor]
    for cls in found:  # `found` grows meanwhile
        found += cls.__subclasses__()
    return found
