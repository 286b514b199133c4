"""How code reaches full parameters: a property for each parameter on a generated subclass of the module's class.

The module keeps its class's name, its `_parameters` and its hooks; `isinstance` holds. Reading `module.weight`
pages the unit in; `forward` runs with the saved-tensor hooks active; what a sharded module cannot do raises.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import nn

from retrograde.errors import UnsupportedError
from retrograde.pages.full_tensor import FullTensor
from retrograde.pages.pager import Pager
from retrograde.pages.saved_tensors import SavedTensors
from retrograde.parameters.casting import CastAround
from retrograde.parameters.leaf import ShardedParameter
from retrograde.torch_internals import ReadsWeightsAnew, own_parameters

MADE = "_retrograde_made"  # marks a generated class


class Sharding(Protocol):
    """What modules need of the engine."""

    saved: SavedTensors
    pager: Pager
    saves_shards: bool  # while true, `state_dict()` returns sharded tensors
    model: nn.Module

    @property
    def copy_model(self) -> Callable[[dict[int, Any]], nn.Module]:
        """Makes a second sharded model, for `copy.deepcopy`."""

    @property
    def grow(self) -> Callable[[], None]:
        """Shards parameters that have joined the model."""

    def cast_around(self, module: nn.Module) -> CastAround | None:
        """The dtypes to which a module's arguments and results are cast, or None if nothing is cast."""


def leaves(module: nn.Module) -> dict[str, ShardedParameter]:
    """The sharded parameters that a module has itself, without those of its children."""
    return {name: leaf for name, leaf in own_parameters(module).items() if isinstance(leaf, ShardedParameter)}


class Sharded(nn.Module):
    """The base of generated classes, ahead of the user's: what a module with sharded parameters does otherwise."""

    _retrograde_engine: Sharding  # keeps the engine alive as long as the model

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return what torch's would. torch's reads the attribute, which here is a full tensor and not the Parameter."""
        leaf = dict(self.named_parameters(remove_duplicate=False)).get(target)
        return super().get_parameter(target) if leaf is None else leaf

    def register_parameter(self, name: str, param: Any) -> None:
        """Do as torch's does, with the parameter in place of its full tensor (`module.weight *= 2`, a tied weight)."""
        super().register_parameter(name, param.leaf if isinstance(param, FullTensor) else param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for name, leaf in self.named_parameters(recurse=recurse):
            if isinstance(leaf, ShardedParameter):
                _refuse_conversion(self, fn, name, leaf)
        own = dict(own_parameters(self))
        own_parameters(self).clear()  # nothing to change in the leaves; buffers are the module's own
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            own_parameters(self).update(own)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Do as torch's does. Whole masters are read one unit at a time; when the whole model has been saved, the
        pager forgets those of the last unit."""
        engine = engine_of(self)
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            if engine is not None and engine.model is self:
                engine.pager.forget_masters()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        sharded = leaves(self)
        if not sharded or self._retrograde_engine.saves_shards:
            return
        for name, leaf in sharded.items():
            if prefix + name in destination:
                destination[prefix + name] = leaf.shown() if keep_vars else leaf.copy_for(destination)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        sharded = leaves(self)
        if sharded and metadata.get("assign_to_params_buffers", False):
            first = prefix + next(iter(sharded))
            errors.append(f"{first}: assign=True would replace sharded parameters; load with assign=False")
            return
        for leaf in sharded.values():
            leaf.forget_writes_to_copies()
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Make a second sharded model (engine/copying.py). All ranks copy it together."""
        engine = engine_of(self)
        if engine is None or engine.model is not self:
            raise UnsupportedError(
                f"a {type(self).__name__} that is part of a sharded model cannot be copied: its shards live on all "
                f"ranks, together with those of other modules. Copy the whole model, or build the part anew and give "
                f"its load_state_dict() what model.state_dict() has of it"
            )
        return engine.copy_model(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"a sharded {type(self).__name__} cannot be pickled: its shards live on all ranks. To save it, use "
            f"model.state_dict(), or engine.state_dict() with torch.distributed.checkpoint"
        )


def engine_of(module: nn.Module) -> Sharding | None:
    """The engine of a module that has sharded parameters or is all of a sharded model; None of any other."""
    engine: Sharding | None = getattr(module, "_retrograde_engine", None)
    return engine


def _refuse_conversion(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], name: str, leaf: ShardedParameter
) -> None:
    """Raise if `module.to()` would convert the parameter. `fn` is tried on a small tensor in its place."""
    probe = torch.empty([2] * leaf.dim(), dtype=leaf.dtype, device=leaf.device)
    in_place = leaf.slot.strides
    if in_place is not None:
        outermost_first = sorted(range(probe.dim()), key=lambda dim: in_place[dim], reverse=True)
        inverse = sorted(range(probe.dim()), key=outermost_first.__getitem__)
        probe = probe.permute(inverse)
    after = fn(probe)
    if after.dtype == probe.dtype and after.device == probe.device and after.stride() == probe.stride():
        return
    raise UnsupportedError(
        f"{type(module).__name__}.to(): parameter {name} is sharded as {leaf.dtype} on {leaf.device}, in the "
        f"memory_format it had: convert the model before rg.shard(), or load its state_dict() into a converted one"
    )


def unpatched(module: nn.Module) -> bool:
    """Has the module sharded parameters for which its class has no property?"""
    return not all(isinstance(getattr(type(module), name, None), property) for name in leaves(module))


def patch(module: nn.Module, engine: Sharding) -> None:
    """Give `module` the generated class: properties for its own parameters, hooks around `forward`.

    Only modules with parameters of their own get hooks: torch.func refuses to start while any are active, and what
    other modules save for backward is activations, unless they use weights of their children.
    """
    names = tuple(leaves(module))
    forward = _forward(type(module), engine.saved if names else None, engine.grow)
    casts = engine.cast_around(module)
    if casts is not None:
        forward = casts.around(forward)
    body = {name: _property(name) for name in names} | {"forward": forward, "_retrograde_engine": engine}
    specialize(module, body, id(engine), casts, *names)


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that the user gave a module, below the generated ones."""
    return next(each for each in cls.__mro__ if MADE not in vars(each) and each not in (Sharded, ReadsWeightsAnew))


_made: "weakref.WeakValueDictionary[Hashable, type[nn.Module]]" = weakref.WeakValueDictionary()


def specialize(module: nn.Module, body: dict[str, object], *key: Hashable) -> None:
    """Give the module a subclass of its class, with `body`. Modules of the same class and key share one subclass, since
    torch.compile keeps code by class. A key names objects that the subclass keeps alive, so their ids will do."""
    cls = type(module)
    if (made := _made.get((id(cls), *key))) is None:
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, MADE: True}
        ahead = (ReadsWeightsAnew, Sharded) if isinstance(module, nn.RNNBase) else (Sharded,)
        bases = (cls,) if isinstance(module, Sharded) else (*ahead, cls)
        made = _made[id(cls), *key] = type(cls.__name__, bases, body)
    module.__class__ = made


def _property(name: str) -> property:
    def get(self: nn.Module) -> Any:
        own = own_parameters(self)
        if name in own:
            leaf = own[name]
            return leaf.shown() if isinstance(leaf, ShardedParameter) else leaf
        return self.__dict__[name] if name in self.__dict__ else nn.Module.__getattr__(self, name)

    # nn.Module takes Parameters itself; this is `del m.w; m.w = tensor`, as torch's old weight_norm does.
    return property(get, lambda self, to: self.__dict__.update({name: to}), lambda self: self.__dict__.pop(name, None))


def _forward(cls: type[nn.Module], saved: SavedTensors | None, grow: Callable[[], None]) -> Callable[..., Any]:
    base = cls.forward

    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        grow()
        if saved is None or not saved.enter():
            return base(self, *args, **kwargs)
        try:
            return base(self, *args, **kwargs)
        finally:
            saved.leave()

    return forward
