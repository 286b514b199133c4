"""Leaves and gradients that know they are pieces of something larger.

[Note: pieces]
After sharding, a parameter is still the same `nn.Parameter` object, but its data is a 1-D piece of the shard, and
so is its gradient. Elementwise code (every optimizer, clipping by value, weight decay by hand) needs nothing more.
Two things do:

- what reads *all* of a parameter or gradient, a norm for instance, must give the answer for the whole: a local
  norm would be a silent error in `torch.nn.utils.clip_grad_norm_`, in LAMB, in GradScaler's check for inf;
- what writes a parameter must first know that no rank still reads it (residency/gate.py).

Both are seen in `__torch_function__`. Full tensors do not come through here, so forward and backward pay nothing.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

from retrograde.errors import UnsupportedError
from retrograde.layout import Slot
from retrograde.residency import Unit, edits

_get_grad = cast(Any, torch.Tensor.grad).__get__
_set_grad = cast(Any, torch.Tensor.grad).__set__
_set_requires_grad = cast(Any, torch.Tensor.requires_grad).__set__
set_data = cast(Any, torch.Tensor.data).__set__
raw_grad = _get_grad  # without what reading `.grad` does


class Holder(Protocol):
    """The engine, as its leaves see it."""

    def access(self, unit: Unit, slot: int) -> torch.Tensor: ...

    def before_grad_read(self) -> None: ...

    def before_grad_write(self, unit: Unit, slot: int) -> None: ...

    def norms(self, tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]: ...

    def total(self, label: str, value: torch.Tensor, combine: Callable[..., torch.Tensor]) -> torch.Tensor: ...


class Piece(torch.Tensor):
    """Behaviour shared by sharded parameters and their gradients."""

    holder: "weakref.ref[Holder]"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (over_all := _OVER_ALL.get(name)) is not None:
            if args and isinstance(args[0], ShardedParameter) and torch.is_grad_enabled() and args[0].requires_grad:
                return func(args[0].full(), *args[1:], **kwargs)  # part of a loss: it must be differentiable
            result = over_all(func, args, kwargs)
            if result is not NotImplemented:
                return result
        written = _written(name, args, kwargs)
        for leaf in written:
            leaf.unit.gate.before_write(f"{name} on {leaf.slot.name}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for leaf in written:
            leaf.unit.gate.after_write(leaf.unit)
        if name in _ALIASES and args and isinstance(args[0], ShardedParameter | _Alias):
            return _Alias.of(result, args[0])
        return result


class _Alias(Piece):
    """A view of a sharded parameter (`p.data`, `p.detach()`, `p.view(-1)`): writing it writes the parameter."""

    unit: Unit
    slot: Slot

    @staticmethod
    def of(data: torch.Tensor, leaf: "ShardedParameter | _Alias") -> "_Alias":
        alias = data.as_subclass(_Alias)
        alias.holder, alias.unit, alias.slot = leaf.holder, leaf.unit, leaf.slot
        return alias

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ShardedParameter(Piece, nn.Parameter):
    """The class of a parameter after sharding. `p.full()` is the whole of it; `p` itself is this rank's piece."""

    slot: Slot
    place: int
    _unit: "weakref.ref[Unit]"

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        if unit is None:
            raise UnsupportedError(f"the engine of sharded parameter {self.slot.name} is gone; keep its model")
        return unit

    @staticmethod
    def adopt(param: nn.Parameter, unit: Unit, index: int, holder: Holder) -> None:
        """Turn a plain parameter, whose data is already the piece, into a sharded one. Identity is kept."""
        param.__class__ = ShardedParameter
        leaf = cast(ShardedParameter, param)
        leaf._unit, leaf.holder = weakref.ref(unit), weakref.ref(holder)
        leaf.place, leaf.slot = index, unit.layout.slots[index]
        leaf._take_over_hooks()

    def _take_over_hooks(self) -> None:
        """Hooks registered before sharding get the same treatment as those registered after it."""
        with torch._C.DisableTorchFunctionSubclass():
            before: Any = self._backward_hooks
            self._backward_hooks = None
            for hook in (before or {}).values():
                self.register_hook(hook)
            tables: Any = self._post_accumulate_grad_hooks
            self._post_accumulate_grad_hooks = None  # type: ignore[assignment]
            for hook in (tables or {}).values():
                self.register_post_accumulate_grad_hook(hook)

    @property
    def requires_grad(self) -> bool:
        return self.unit.trained[self.place]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        _set_requires_grad(self, value)
        self.unit.trained[self.place] = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedParameter":
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As torch's. The hook sees this rank's piece of the reduced gradient, once a reduction, and nothing when a
        backward brings no gradient: a unit's node runs for all of its parameters, torch's only for those used."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().register_hook(  # type: ignore[no-untyped-call]
                lambda grad: None if grad is None else hook(grad)
            )

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """As torch's: runs when a reduced gradient has been added to `.grad`, so at the end of a window."""

        def arrived(leaf: torch.Tensor) -> None:
            if self.unit.arrived[self.place]:
                hook(leaf)

        with torch._C.DisableTorchFunctionSubclass():
            handle = super().register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            self.unit.watch_hooks(self._post_accumulate_grad_hooks)
        return handle

    def full(self) -> torch.Tensor:
        return _alive(self).access(self.unit, self.place)

    def piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a full-shaped tensor."""
        return full.reshape(-1)[self.unit.layout.within(self.slot, self.unit.rank)]

    @property
    def grad(self) -> torch.Tensor | None:
        holder = self.holder()
        if holder is not None:
            holder.before_grad_read()
        raw = _get_grad(self)
        if raw is None or type(raw) is ShardedGradient:
            return cast("torch.Tensor | None", raw)
        piece = raw.as_subclass(ShardedGradient)
        piece.holder = self.holder
        _set_grad(self, piece)
        return cast(torch.Tensor, piece)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if holder := self.holder():
            holder.before_grad_write(self.unit, self.place)
        if value is not None and value.shape == self.slot.shape != self.shape:
            value = self.piece_of(value)
        _set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = f"piece {tuple(self.shape)} of {tuple(self.slot.shape)} on rank {self.unit.rank}"
        return f"ShardedParameter({self.slot.name}: {where}, {self.dtype}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            f"parameter {self.slot.name} is sharded and cannot be copied: its other pieces are on other ranks. "
            f"Use engine.full_params() for the whole tensor, or p.detach().clone() for this rank's piece"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"parameter {self.slot.name} is sharded and cannot be pickled; save model.state_dict() instead"
        )


class ShardedGradient(Piece):
    """What `p.grad` is: this rank's piece of the reduced gradient."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()


def _alive(piece: Any) -> Holder:
    holder = piece.holder()
    if holder is None:
        raise UnsupportedError("the engine of this sharded model is gone; keep the model that rg.shard() was given")
    return cast(Holder, holder)


# ---- writes
_ALIASES = {"detach", "view", "reshape", "flatten", "view_as", "narrow", "__getitem__", "alias"}


def _written(name: str, args: Any, kwargs: Any) -> list[Any]:
    """The sharded parameters a function is about to change."""
    if kwargs and (out := kwargs.get("out")) is not None:
        targets: Any = out
    elif args and edits(name):
        targets = args[0]
    else:
        return []
    found = targets if isinstance(targets, list | tuple) else (targets,)
    return [t for t in found if isinstance(t, ShardedParameter | _Alias)]


# ---- reading all of it
def _norm_order(args: Any, kwargs: Any, keyword: str) -> float:
    order = args[1] if len(args) > 1 else kwargs.get(keyword, 2)
    return float({"fro": 2.0, None: 2.0}.get(order, order))


def _one_norm(keyword: str) -> Callable[..., Any]:
    def norm(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        rest = [value for name, value in kwargs.items() if name not in (keyword, "dtype", "input")]
        if len(args) > 2 or any(value not in (None, False) for value in rest) or not isinstance(args[0], Piece):
            return NotImplemented
        return _alive(args[0]).norms([args[0]], _norm_order(args, kwargs, keyword))[0]

    return norm


def _foreach_norm(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not all(isinstance(tensor, Piece) for tensor in args[0]):
        return NotImplemented
    return _alive(args[0][0]).norms(list(args[0]), _norm_order(args, kwargs, "ord"))


def _reduction(combine: Callable[..., torch.Tensor], start: Callable[[Any], Any] | None) -> Callable[..., Any]:
    def over_all(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Piece):
            return NotImplemented
        piece = args[0]
        with torch._C.DisableTorchFunctionSubclass():
            plain = piece.as_subclass(torch.Tensor).detach()
            local = func(plain) if plain.numel() or start is None else plain.new_tensor(start(plain))
        return _alive(piece).total(func.__name__, local, combine)

    return over_all


def _found_inf(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """GradScaler's check: inf on one rank is inf on all."""
    grads, found = args[0], args[1]
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    pieces = [grad for grad in grads if isinstance(grad, Piece)]
    if pieces:
        found.copy_(_alive(pieces[0]).total("found_inf", found.clone(), torch.maximum))
    return result


def _lowest(like: torch.Tensor) -> float:
    return torch.finfo(like.dtype).min if like.is_floating_point() else torch.iinfo(like.dtype).min


def _highest(like: torch.Tensor) -> float:
    return torch.finfo(like.dtype).max if like.is_floating_point() else torch.iinfo(like.dtype).max


_OVER_ALL: dict[str, Callable[..., Any]] = {
    "norm": _one_norm("p"),
    "linalg_vector_norm": _one_norm("ord"),
    "linalg_norm": _one_norm("ord"),
    "_foreach_norm": _foreach_norm,
    "sum": _reduction(torch.add, None),
    "max": _reduction(torch.maximum, _lowest),
    "amax": _reduction(torch.maximum, _lowest),
    "min": _reduction(torch.minimum, _highest),
    "amin": _reduction(torch.minimum, _highest),
    "any": _reduction(torch.logical_or, None),
    "all": _reduction(torch.logical_and, None),
    "_amp_foreach_non_finite_check_and_unscale_": _found_inf,
}
