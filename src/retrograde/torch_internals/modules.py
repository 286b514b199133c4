"""Modules: what they have themselves, what is in a wrapper, how they are reset, and methods that torch calls by private
names."""

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from retrograde.torch_internals.probes import When, expect, probe, tiny

# ---- what a module has itself
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
"""The table of a module's own parameters, by name. Changing it changes the module."""
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")
"""The table of a module's own buffers, by name. Changing it changes the module."""


@probe(
    "tables of a module",
    "own_parameters",
    "own_buffers",
    needed_for="finding a model's parameters, reading them by attribute, and making models real that are on meta",
    otherwise="parameters are not sharded, or module.weight is a rank's piece",
)
def _modules_have_tables() -> None:
    """Assumes: a module has its own parameters and buffers in two dictionaries, which are all that it looks at."""
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(tiny()))
    module.register_parameter("bias", None)
    module.register_buffer("mean", tiny())
    expect(list(own_parameters(module)), ["weight", "bias"], "the table of parameters")
    expect(list(own_buffers(module)), ["mean"], "the table of buffers")
    other, mean = nn.Parameter(tiny()), tiny()
    own_parameters(module)["weight"], own_buffers(module)["mean"] = other, mean
    expect(module.weight is other, True, "whether the attribute is what the table has")
    expect(next(module.parameters()) is other, True, "whether parameters() has what the table has")
    expect(module.mean is mean, True, "whether a buffer is what the table has")


# ---- modules around another
_WRAPPERS = {  # by module, since both take long to import: the class, and the attribute with the module inside
    "torch._dynamo.eval_frame": ("OptimizedModule", "_orig_mod"),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("ActivationWrapper", "_checkpoint_wrapped_module"),
}


def wrapped_module(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile(module)` and torch's wrappers for checkpoints, whose own arguments are any."""
    for file, (cls, inside) in _WRAPPERS.items():
        if file in sys.modules and isinstance(module, getattr(sys.modules[file], cls)):
            return wrapped_module(getattr(module, inside))
    return module


@probe(
    "modules around another",
    "wrapped_module",
    needed_for="knowing which keyword arguments a compiled or checkpointed block of a pipeline takes",
    otherwise="blocks get keyword arguments that they do not take",
    when=When.DOCTOR,  # Dynamo takes a second to import
)
def _wrappers_have_a_module_inside() -> None:
    """Assumes: `torch.compile(module)` and `checkpoint_wrapper(module)` are modules of these classes, which have the
    module by these names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Module()
    wrappers: list[Any] = [torch.compile(inner), checkpoint_wrapper(inner), inner]
    expect([wrapped_module(wrapper) is inner for wrapper in wrappers], [True] * 3, "whether the module inside is found")


# ---- how it is reset
_RESETS = ("reset_parameters", "_reset_parameters")  # the second: attention and transformers


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The method that gives a module's own parameters their first values, if it has one."""
    found = (getattr(module, name, None) for name in _RESETS)
    return next((reset for reset in found if callable(reset)), None)


@probe(
    "how modules are reset",
    "reset_of",
    needed_for="models that are built on the meta device",
    otherwise="shard() refuses a model on the meta device that contains attention",
)
def _modules_can_be_reset() -> None:
    """Assumes: torch's modules have `reset_parameters` or, those with attention, `_reset_parameters`."""
    for cls in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention, nn.Transformer):
        expect(
            any(callable(getattr(cls, name, None)) for name in _RESETS), True, f"whether {cls.__name__} is resettable"
        )


# ---- recurrent ones
def forget_weight_references(module: nn.Module) -> None:
    """Have a recurrent module forget its weak references to its weights, with which torch refuses to swap a tensor."""
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = [None for _ in module._flat_weights_names]


class ReadsWeightsAnew:
    """A base ahead of a recurrent module's class: it makes the list of weights at each use, and torch's keeps one."""

    _flat_weights_names: list[str]
    _flat_weights = property(lambda self: [getattr(self, n) for n in self._flat_weights_names], lambda self, _: None)

    def flatten_parameters(self) -> None:
        """Do nothing: in a page the weights are contiguous already."""


@probe(
    "weights of recurrent modules",
    "forget_weight_references",
    "ReadsWeightsAnew",
    needed_for="nn.RNN, nn.LSTM and nn.GRU",
    otherwise="they compute with weights that are stale, or not in memory",
)
def _recurrent_modules_keep_a_list() -> None:
    """Assumes: recurrent modules compute with `_flat_weights`, whose names are in `_flat_weights_names`, and keep weak
    references in `_flat_weight_refs`."""
    module = nn.RNN(1, 1, nonlinearity="relu", bias=False, device="meta")  # where no random numbers are drawn
    expect(len(module._flat_weight_refs), len(module._flat_weights), "how many weak references there are")
    module.__class__ = type("RNN", (ReadsWeightsAnew, nn.RNN), {})
    for name in own_parameters(module):
        own_parameters(module)[name] = nn.Parameter(2 * tiny(1).view(1, 1))
    given = tiny().view(2, 1)
    expect(module(given)[0].flatten().tolist(), [2.0, 6.0], "what it computes with weights that were replaced")
    module._flat_weights = []  # torch does so when they change
    expect(module(given)[0].flatten().tolist(), [2.0, 6.0], "what it computes when its list was set")
    forget_weight_references(module)
    expect(module._flat_weight_refs, [None, None], "the weak references")
    expect(module(given)[0].flatten().tolist(), [2.0, 6.0], "what it computes without weak references")


# ---- methods that torch calls
OVERRIDDEN: dict[type, tuple[str, ...]] = {
    nn.Module: ("_apply", "_save_to_state_dict", "_load_from_state_dict"),
    nn.Parameter: ("_is_param",),
}
"""Private names of torch's that classes of ours define, so that torch finds ours."""


@probe(
    "methods that torch calls of a module",
    "OVERRIDDEN",
    needed_for="model.to(), model.state_dict() and model.load_state_dict() of a sharded model",
    otherwise="they see a rank's pieces as if these were the parameters",
)
def _modules_are_asked_one_by_one() -> None:
    """Assumes: `to()`, `state_dict()` and `load_state_dict()` call `_apply`, `_save_to_state_dict` and
    `_load_from_state_dict` of each module; the last gets a list of errors last, and is told of `assign=True` in its
    metadata."""
    called: list[str] = []

    class Inner(nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            called.append("apply")
            return self

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            called.append(f"save {prefix}")

        def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            called.append(f"load {prefix} {metadata.get('assign_to_params_buffers')} {rest[-1]}")

    outer = nn.ModuleDict({"inner": Inner()})
    outer.to(torch.float64)
    outer.state_dict()
    outer.load_state_dict({}, assign=True)
    expect(called, ["apply", "save inner.", "load inner. True []"], "what was called")


@probe(
    "tensors that count as parameters",
    "OVERRIDDEN",
    needed_for="isinstance(module.weight, nn.Parameter)",
    otherwise="libraries that look for parameters among attributes find none",
)
def _parameters_are_marked() -> None:
    """Assumes: a tensor with a true `_is_param` is an instance of nn.Parameter."""

    class Marked(torch.Tensor):
        _is_param = True

    expect(isinstance(tiny().as_subclass(Marked), nn.Parameter), True, "whether it is a parameter")
    expect(isinstance(tiny(), nn.Parameter), False, "whether any tensor is")
