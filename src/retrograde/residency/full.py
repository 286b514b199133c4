"""What `module.weight` returns: a full-shaped tensor that tells its unit before it is edited."""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from retrograde.residency.unit import Unit

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_get_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
_NOT_EDITS = {"requires_grad_", "detach_", "share_memory_", "rename_"}


def edits(name: str) -> bool:
    """Does a method or function of this name change its first argument in place?"""
    if name.endswith("__"):
        return name in _OPERATORS or name == "__setitem__"
    return name.endswith("_") and name not in _NOT_EDITS


class FullTensor(torch.Tensor):
    """A view of a page. Operations on it give plain tensors; only in-place edits are different.

    An edit (`w.clamp_()`, `w.data.fill_()`) is written back to the shard, where torch's own parameter would
    have it. `data` shares the version counter, unlike torch's, so that no edit goes unseen.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _unit: "weakref.ref[Unit]"
    _slot: int

    @staticmethod
    def of(data: torch.Tensor, unit: "Unit", slot: int) -> "FullTensor":
        full = torch.Tensor._make_subclass(FullTensor, data)
        full._unit, full._slot = weakref.ref(unit), slot
        return full

    def point_to(self, data: torch.Tensor) -> None:
        """Swap the memory behind this tensor; its place in the autograd graph stays."""
        _set_data(self, data)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's, which is this rank's piece: the object that `p.grad` is."""
        leaf = self._leaf()
        return None if leaf is None else leaf.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (leaf := self._leaf()) is not None:
            leaf.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        return bool(_get_requires_grad(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """`module.weight.requires_grad = False` is how most people freeze: it is said of the parameter."""
        if (leaf := self._leaf()) is not None:
            leaf.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> "FullTensor":
        self.requires_grad = requires_grad
        return self

    def _leaf(self) -> torch.Tensor | None:
        unit = self._unit()
        return None if unit is None else unit.leaves[self._slot]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _reporting(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def edit(self: FullTensor, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit()
        if unit is None:
            return method(self, *args, **kwargs)
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError(
                f"parameter {unit.layout.slots[self._slot].name} requires grad and is used in an in-place "
                f"operation ({name}); edit weights under torch.no_grad()"
            )
        with unit.gate.writing(f"{name} on {unit.layout.slots[self._slot].name}", [(unit, self._slot)]):
            result = method(self, *args, **kwargs)
            unit.write_back(self._slot)
        return result

    return edit


for _name in dir(torch.Tensor):
    if edits(_name) and callable(getattr(torch.Tensor, _name)):
        setattr(FullTensor, _name, _reporting(_name))
