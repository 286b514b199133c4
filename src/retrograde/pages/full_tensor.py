"""What `module.weight` returns: a full-shaped tensor that tells its unit before it is edited."""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from retrograde.errors import UnsupportedError
from retrograde.pages.watched import Watched
from retrograde.torch_internals import (
    NO_TORCH_FUNCTION,
    get_requires_grad,
    make_subclass,
    overloads,
    returns_of,
    storage_id,
)

T = TypeVar("T")

if TYPE_CHECKING:
    from retrograde.pages.unit import Unit

_NOT_EDITS = {"requires_grad_", "detach_", "share_memory_", "rename_"}


# Edits of what a tensor is, not of its elements.
RESHAPES = {"set_", "resize_", "resize_as_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}
RESHAPES |= {"as_strided_"}


@functools.cache
def edits(name: str) -> bool:
    """Does a method or function of this name change its first argument in place?"""
    if name.endswith("__"):  # `__iadd__` beside `__add__`; there is no `__nit__`
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
    return name.endswith("_") and name not in _NOT_EDITS


def alive(reference: "weakref.ref[T]") -> T:
    """What a weak reference into a sharded model leads to. Raises if the model is gone."""
    found = reference()
    if found is None:
        raise UnsupportedError("the sharded model of this tensor or graph is gone; keep it until its last backward")
    return found


class Aliased(Watched):
    """A tensor that shares memory with a page. Operations on it give plain tensors, but for two kinds:

    An edit (`w.clamp_()`, `w.data.fill_()`) is written back to the shard, where torch's own parameter would have it.
    A view that takes no part in a graph (`w.data`, `w.T` under no_grad) may be edited as well, so it is `Aliased` too.
    """

    __torch_function__ = NO_TORCH_FUNCTION
    _unit: "weakref.ref[Unit]"
    _slot: int

    def _alias(self, view: Any) -> Any:
        if isinstance(view, list | tuple):
            return type(view)(self._alias(each) for each in view)
        if type(view) is not torch.Tensor:
            return view
        recorded = torch.is_grad_enabled() and view.requires_grad
        if recorded or storage_id(view) != storage_id(self):
            return view
        alias = view.as_subclass(Aliased)
        alias._unit = self._unit
        alias._slot = self._slot
        return alias

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class FullTensor(Aliased):
    """What `module.weight` returns: a full-shaped view of a page, in the graph of its parameter."""

    _is_param = True  # to `isinstance(module.weight, nn.Parameter)`

    @staticmethod
    def of(data: torch.Tensor, unit: "Unit", slot: int) -> "FullTensor":
        full = make_subclass(FullTensor, data)
        full._unit = weakref.ref(unit)
        full._slot = slot
        return full

    @property
    def leaf(self) -> nn.Parameter:
        return alive(self._unit).leaves[self._slot]

    # The parameter's gradient, which is this rank's piece: the object that `p.grad` is.
    grad = property(lambda self: self.leaf.grad, lambda self, value: setattr(self.leaf, "grad", value))
    grad = grad.deleter(lambda self: setattr(self.leaf, "grad", None))
    # Hooks too: they see what the parameter's see.
    register_hook = property(lambda self: self.leaf.register_hook)
    register_post_accumulate_grad_hook = property(lambda self: self.leaf.register_post_accumulate_grad_hook)
    is_leaf = False  # also of a frozen one: optimizers are to be given parameters, and say so
    # `module.weight.requires_grad = False` is how most people freeze: it is said of the parameter.
    requires_grad = property(lambda self: bool(get_requires_grad(self)), lambda self, on: self.requires_grad_(on))

    def retain_grad(self) -> None:
        """Do nothing, as torch's does for a leaf."""

    def requires_grad_(self, requires_grad: bool = True) -> "FullTensor":
        self.leaf.requires_grad_(requires_grad)
        return self


def _reporting(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def edit(self: Aliased, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit()
        if unit is None:
            return method(self, *args, **kwargs)
        if name in RESHAPES:
            parameter = unit.layout.slots[self._slot].name
            raise UnsupportedError(
                f"rank {unit.grid.rank}: {name} would change the shape of what shows parameter {parameter}, and not of "
                f"the parameter: use the function that returns another tensor ({name[:-1]})"
            )
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError(
                f"parameter {unit.layout.slots[self._slot].name} requires grad and is used in an in-place "
                f"operation ({name}); edit weights under torch.no_grad()"
            )
        with unit.editing(name, self._slot):
            return method(self, *args, **kwargs)

    return edit


def _aliasing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def view(self: Aliased, *args: Any, **kwargs: Any) -> Any:
        return self._alias(method(self, *args, **kwargs))

    return view


@functools.cache
def views(name: str) -> bool:
    """Does torch's method of this name return a view of its tensor? Its schema says so."""
    returned = [returns_of(overload) for overload in overloads(name)]
    return name == "__getitem__" or any(r and r[0].alias_info and not r[0].alias_info.is_write for r in returned)


for _name in dir(torch.Tensor):
    if edits(_name) and callable(getattr(torch.Tensor, _name)):
        setattr(Aliased, _name, _reporting(_name))
    elif _name in ("T", "mT", "H", "mH"):
        setattr(Aliased, _name, property(_aliasing(getattr(torch.Tensor, _name).__get__)))
    elif views(_name) and callable(getattr(torch.Tensor, _name)):
        setattr(Aliased, _name, _aliasing(getattr(torch.Tensor, _name)))
