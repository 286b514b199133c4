"""How code reaches full parameters: a property for each parameter on a generated subclass of the module's class.

The module keeps its class's name, its `_parameters` and its hooks; `isinstance` holds. Reading `module.weight`
pages the unit in; `forward` runs with the saved-tensor hooks active; what a sharded module cannot do raises.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import nn

from retrograde.errors import UnsupportedError
from retrograde.residency.saved import SavedTensors

Before = Callable[[], None]  # runs ahead of a forward
MADE = "_retrograde_made"  # marks a generated class


class Leaf:
    """A sharded parameter, as modules see it (optim/pieces.py)."""

    __slots__ = ()

    def full(self) -> torch.Tensor:
        raise NotImplementedError


def patch(
    module: nn.Module, saved: SavedTensors, names: Sequence[str], engine: object, before: Before | None = None
) -> None:
    """Give `module` the generated class: properties for its own parameters `names`, hooks around `forward`.

    Hooks only where parameters are: torch.func refuses to start while any are active, and what a module without
    parameters of its own saves is, but for weights it takes from its children, activations.
    The class holds the engine, so that it lives as long as the model.
    """
    cls = type(module)
    body: dict[str, Any] = {name: _property(name) for name in names}
    body["forward"] = _forward(cls, saved if names else None, before)
    if getattr(cls, "_retrograde_engine", None) is None:  # once, however often parameters are added later
        body |= {
            "_apply": _apply,
            "_save_to_state_dict": _saving(cls),
            "_load_from_state_dict": _loading(cls),
            "get_parameter": _get_parameter,
            "_retrograde_engine": engine,
        }
    if isinstance(module, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
        body["flatten_parameters"] = lambda self: None  # the weights are contiguous in the page
    specialize(module, body, id(engine), id(before), *names)


_made: "weakref.WeakValueDictionary[Hashable, type[nn.Module]]" = weakref.WeakValueDictionary()


def specialize(module: nn.Module, body: dict[str, Any], *key: Hashable) -> None:
    """Put a subclass with `body` on top of the module's class. Modules that were alike stay alike and share it:
    compiled code is kept by class. A key names what the subclass itself keeps alive, so identities will do."""
    cls = type(module)
    if (made := _made.get((id(cls), *key))) is None:
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        body |= {"__reduce_ex__": _refuse_copy, MADE: True}
        made = _made[id(cls), *key] = type(cls.__name__, (cls,), body)
    module.__class__ = made


def _property(name: str) -> property:
    def get(self: nn.Module) -> Any:
        if name in self._parameters:
            leaf: Any = self._parameters[name]
            return leaf.full() if isinstance(leaf, Leaf) else leaf
        return self.__dict__[name] if name in self.__dict__ else nn.Module.__getattr__(self, name)

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value  # nn.Module takes Parameters itself; this is `del m.w; m.w = tensor`

    def delete(self: nn.Module) -> None:
        self.__dict__.pop(name, None)

    return property(get, put, delete)


def _forward(cls: type[nn.Module], saved: SavedTensors | None, before: Before | None) -> Callable[..., Any]:
    base = cls.forward

    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        if saved is None or not saved.enter():
            return base(self, *args, **kwargs)
        try:
            return base(self, *args, **kwargs)
        finally:
            saved.leave()

    return forward


def _flat_weights(self: nn.RNNBase) -> list[torch.Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


def _sharded(self: nn.Module) -> dict[str, Any]:
    return {name: leaf for name, leaf in self._parameters.items() if isinstance(leaf, Leaf)}


def _get_parameter(self: nn.Module, target: str) -> Any:
    """As torch's, which looks for a Parameter by reading the attribute."""
    leaf = dict(self.named_parameters(remove_duplicate=False)).get(target)
    return nn.Module.get_parameter(self, target) if leaf is None else leaf


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    for name, leaf in self.named_parameters(recurse=recurse):
        if isinstance(leaf, Leaf):
            probe = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            if (after := fn(probe)).dtype != probe.dtype or after.device != probe.device:
                raise UnsupportedError(
                    f"{type(self).__name__}.to(): parameter {name} is sharded as {leaf.dtype} on {leaf.device} and "
                    f"cannot become {after.dtype} on {after.device} in place; convert the model before rg.shard(), "
                    f"or load a state_dict() of this model into a converted one"
                )
    own = dict(self._parameters)
    self._parameters.clear()  # nothing to change in the leaves; buffers are the module's own
    try:
        return cast(nn.Module, nn.Module._apply(self, fn, recurse))  # type: ignore[no-untyped-call]
    finally:
        self._parameters.update(own)


def _saving(cls: type[nn.Module]) -> Callable[..., None]:
    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        cls._save_to_state_dict(self, destination, prefix, keep_vars)
        for name, leaf in _sharded(self).items():
            if prefix + name in destination:
                full = leaf.full()
                destination[prefix + name] = full if keep_vars else full.detach().clone()

    return save


def _loading(cls: type[nn.Module]) -> Callable[..., None]:
    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        error_msgs: list[str] = rest[-1]
        sharded = _sharded(self)
        if sharded and metadata.get("assign_to_params_buffers", False):
            first = prefix + next(iter(sharded))
            error_msgs.append(f"{first}: assign=True would replace sharded parameters; load with assign=False")
            return
        for name, leaf in sharded.items():
            given = state_dict.get(prefix + name)
            if not isinstance(given, torch.Tensor):
                continue
            if given.shape != leaf.slot.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {given.shape} from checkpoint, "
                    f"the shape in current model is {leaf.slot.shape}."
                )
                state_dict[prefix + name] = leaf.detach()  # leaves it as it is
            else:
                state_dict[prefix + name] = leaf.piece_of(given)
        cls._load_from_state_dict(self, state_dict, prefix, metadata, *rest)

    return load


def _refuse_copy(self: nn.Module, protocol: Any) -> Any:
    raise UnsupportedError(
        f"a sharded {type(self).__name__} cannot be copied or pickled: its shards live on all ranks. Build a new "
        f"model and load_state_dict(model.state_dict()), or save model.state_dict()"
    )
