"""How code reaches full parameters: a property for each parameter on a generated subclass of the module's class.

The module keeps its class's name, its `_parameters` and its hooks; `isinstance` holds. Reading `module.weight`
pages the unit in; `forward` runs with the saved-tensor hooks active; what a sharded module cannot do raises.
"""

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from retrograde.errors import UnsupportedError
from retrograde.residency.saved import SavedTensors


class Leaf(Protocol):
    """A sharded parameter, as modules see it (optim/pieces.py)."""

    def full(self) -> torch.Tensor: ...


_leaf_type: type[Any] | None = None

_NOT_GIVEN = (
    "a sharded parameter is read outside the forward of its unit: it is paged in eagerly, and the graph ends here"
)
MADE = "_retrograde_made"  # marks a generated class
GIVEN = "_retrograde_given"  # what a module's parameters are while its region runs (compiling/regions.py)
_tracing = torch.compiler.is_dynamo_compiling


class Patched(Protocol):
    """The engine, as the classes it generates see it."""

    saved: SavedTensors
    classes: dict[Any, type[nn.Module]]


def tend(leaf_type: type[Any]) -> None:
    """Tell which class of leaves is read through its full tensor."""
    global _leaf_type
    _leaf_type = leaf_type


def patch(module: nn.Module, names: tuple[str, ...], engine: Patched) -> None:
    """Give `module` the generated class: properties for its own parameters `names`, hooks around `forward`.

    Hooks only where parameters are: torch.func refuses to start while any are active, and what a module without
    parameters of its own saves is, but for weights it takes from its children, activations.
    """
    cls = type(module)
    body: dict[str, Any] = {name: _property(name) for name in names}
    if names:
        body["forward"] = _forward(cls, engine.saved)
    if isinstance(module, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
        body["flatten_parameters"] = lambda self: None  # the weights are contiguous in the page
    specialize(module, ("parameters", *names), body, engine)


def announce(module: nn.Module, before: Callable[[], None], engine: Patched) -> None:
    """Call `before` ahead of every forward of `module`."""
    specialize(module, ("announced",), {"forward": _announced(type(module), before)}, engine)


def specialize(module: nn.Module, what: tuple[str, ...], body: dict[str, Any], engine: Patched) -> None:
    """Put a generated class on top of the module's own. Modules of one class share it, and so their compiled graphs.

    The class holds the engine, so that it lives as long as the model.
    """
    cls = type(module)
    if (cls, what) not in engine.classes:
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, MADE: True}
        if getattr(cls, "_retrograde_engine", None) is None:  # once, however often parameters are added later
            body |= {
                "_apply": _apply,
                "_save_to_state_dict": _saving(cls),
                "_load_from_state_dict": _loading(cls),
                "__reduce_ex__": _refuse_copy,
                "_retrograde_engine": engine,
                GIVEN: None,
            }
        engine.classes[cls, what] = type(cls.__name__, (cls,), body)
    module.__class__ = engine.classes[cls, what]


def original(module: nn.Module) -> type[nn.Module]:
    """The class the user gave the module."""
    return next(cls for cls in type(module).__mro__ if MADE not in vars(cls))


def _property(name: str) -> property:
    def get(self: nn.Module) -> Any:
        if _tracing():
            given: dict[str, torch.Tensor] | None = self._retrograde_given  # type: ignore[assignment]
            if given is not None and name in given:
                return given[name]
            torch._dynamo.graph_break(msg=_NOT_GIVEN)
        leaf = self._parameters.get(name)
        if type(leaf) is _leaf_type:
            return leaf.full()  # type: ignore[union-attr]
        if name in self._parameters:
            return leaf
        if name in self.__dict__:
            return self.__dict__[name]
        return nn.Module.__getattr__(self, name)

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value  # nn.Module takes Parameters itself; this is `del m.w; m.w = tensor`

    def delete(self: nn.Module) -> None:
        self.__dict__.pop(name, None)

    return property(get, put, delete)


def _forward(cls: type[nn.Module], saved: SavedTensors) -> Callable[..., Any]:
    base = cls.forward

    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _tracing() or not saved.enter():
            return base(self, *args, **kwargs)
        try:
            return base(self, *args, **kwargs)
        finally:
            saved.leave()

    return forward


def _announced(cls: type[nn.Module], before: Callable[[], None]) -> Callable[..., Any]:
    base = cls.forward

    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before()
        return base(self, *args, **kwargs)

    return closed(forward, "retrograde looks for new parameters before each forward of the model")


def closed(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Dynamo does not inline `function`, but may compile what it calls: `torch.compiler.disable` without a wrapper."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
    return function


def own_frame(cls: type[nn.Module]) -> Callable[..., Any]:
    """`cls.forward` behind a function with code of its own: Dynamo starts no graph in torch's files, and it counts
    recompilations by code."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_of_{cls.__name__}")
    return forward


def all_code() -> list[CodeType]:
    """Dynamo may inline what is in this file, but is not to start here (compiling/regions.py, Rule 3)."""

    def nested(code: CodeType) -> list[CodeType]:
        inner = [item for item in code.co_consts if isinstance(item, CodeType)]
        return [code, *(found for item in inner for found in nested(item))]

    own = [item for item in globals().values() if isinstance(item, FunctionType) and item.__module__ == __name__]
    return [code for function in own for code in nested(function.__code__)]


def _flat_weights(self: nn.RNNBase) -> list[torch.Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


def _sharded(self: nn.Module) -> dict[str, Any]:
    return {name: leaf for name, leaf in self._parameters.items() if type(leaf) is _leaf_type}


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    for name, leaf in self.named_parameters(recurse=recurse):
        if type(leaf) is _leaf_type:
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
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        nn.Module._apply(self, fn, recurse=False)  # type: ignore[no-untyped-call]
        return self
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
