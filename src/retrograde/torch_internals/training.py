"""Training: what runs around clipping, zeroing gradients, optimizer states and initializers, whoever calls them.

torch has no hooks for these, so its own functions and classes are changed, once for the process.
"""

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from retrograde.errors import InternalsChanged
from retrograde.torch_internals.probes import When, expect, probe, tiny

# ---- clipping
SeeParameters = Callable[[list[torch.Tensor]], None]


def before_clipping(call: SeeParameters) -> None:
    """Have `call(parameters)` run before torch clips the gradients of these parameters."""
    cells = [_cell_of(public) for public in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)]
    for cell in cells:
        cell.cell_contents = _after_call(cell.cell_contents, call)


def _cell_of(public: Any) -> types.CellType:
    """Where a function keeps the one that does the work."""
    cells: tuple[types.CellType, ...] = public.__closure__ or ()
    inner = cells[0].cell_contents if len(cells) == 1 else None
    if not isinstance(inner, types.FunctionType) or inner.__name__ != public.__name__:
        raise InternalsChanged(f"torch.nn.utils.{public.__name__} is no longer a closure over what it does")
    return cells[0]


def _after_call(inner: Callable[..., Any], call: SeeParameters) -> Callable[..., Any]:
    @functools.wraps(inner)
    def clip(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            call([parameters])
        elif given := list(parameters):
            call(given)
            parameters = given  # a generator is used up; torch warns of an empty one, which it still is
        return inner(parameters, *args, **kwargs)

    return clip


@probe(
    "how gradients are clipped",
    "before_clipping",
    needed_for="clipping on a rank that has no gradient where others have one",
    otherwise="the other ranks wait for it until their time is up",
)
def _clipping_is_a_closure() -> None:
    """Assumes: `clip_grad_norm_` and `clip_grad_value_` are closures over the functions that do the work, so that
    changing the cell reaches everybody, however the name was imported and when."""
    seen: list[Any] = []
    for public in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_):
        cell = _cell_of(public)
        inner = cell.cell_contents
        cell.cell_contents = _after_call(inner, seen.extend)
        try:
            leaf = tiny(requires_grad=True)
            leaf.grad = tiny()
            public(iter([leaf]), 1.0)
        finally:
            cell.cell_contents = inner
        expect(seen.pop() is leaf, True, f"whether {public.__name__} was seen")


def clip_together(cls: type[torch.Tensor]) -> None:
    """Let torch clip tensors of this class in one operation over all of them, as it does plain ones."""
    _taken_together().append(cls)


def _taken_together() -> list[type]:
    classes: list[type] = import_module("torch.utils._foreach_utils")._foreach_supported_types
    return classes


@probe(
    "gradients that are clipped together",
    "clip_together",
    needed_for="one meeting of all ranks for a gradient norm instead of one for each parameter",
    otherwise="clipping takes as many meetings as there are parameters",
)
def _classes_can_be_clipped_together() -> None:
    """Assumes: torch looks into a list for the classes of tensors that its operations over many tensors take."""

    class Probed(torch.Tensor):
        pass

    gradient = tiny().as_subclass(Probed)
    many: Callable[..., bool] = import_module("torch.utils._foreach_utils")._has_foreach_support
    expect(many([gradient], gradient.device), False, "whether a class that is not in the list is taken")
    clip_together(Probed)
    try:
        expect(many([gradient], gradient.device), True, "whether a class in the list is taken")
    finally:
        _taken_together().remove(Probed)


# ---- zeroing
def before_zero_grad(call: SeeParameters) -> None:
    """Have `call(parameters)` run before any optimizer's or module's `zero_grad()`."""
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(of_optimizer)
    def zero_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
        call([param for group in self.param_groups for param in group["params"]])
        of_optimizer(self, set_to_none)

    @functools.wraps(of_module)
    def zero_module(self: nn.Module, set_to_none: bool = True) -> None:
        call(list(self.parameters()))
        of_module(self, set_to_none)

    Optimizer.zero_grad = zero_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = zero_module  # type: ignore[method-assign]


@probe(
    "who zeroes gradients",
    "before_zero_grad",
    needed_for="zero_grad() on a rank that has no gradient where others have one",
    otherwise="gradients of other ranks' backwards arrive after zero_grad()",
)
def _zeroing_is_inherited() -> None:
    """Assumes: torch's optimizers and modules inherit `zero_grad`. A class that has its own and does not call torch's
    is not seen."""
    expect(_own_ones(torch.optim, Optimizer, "zero_grad"), [], "the optimizers that have their own")
    expect(_own_ones(nn, nn.Module, "zero_grad"), [], "the modules that have their own")


def _own_ones(where: Any, base: type, method: str) -> list[str]:
    """Classes there that derive from `base` and do not inherit its method."""
    classes = [each for each in vars(where).values() if isinstance(each, type) and issubclass(each, base)]
    return [each.__name__ for each in classes if getattr(each, method) is not getattr(base, method)]


# ---- optimizer states
Saved = Callable[[Optimizer, dict[str, Any]], None]
Loading = Callable[[Optimizer, dict[str, Any]], dict[str, Any] | None]


def watch_optimizer_states(saved: Saved, loading: Loading) -> None:
    """Have `saved` see what any optimizer's `state_dict()` returns, before users' own hooks, and `loading` change what
    its `load_state_dict()` gets, after them."""
    Optimizer.state_dict = _saving(Optimizer.state_dict, saved)  # type: ignore[method-assign]
    Optimizer.load_state_dict = _loading(Optimizer.load_state_dict, loading)  # type: ignore[method-assign]


def _saving(save: Callable[..., Any], saved: Saved) -> Callable[..., Any]:
    @functools.wraps(save)
    def state_dict(self: Optimizer) -> Any:
        hook = self.register_state_dict_post_hook(saved, prepend=True)
        try:
            return save(self)
        finally:
            hook.remove()

    return state_dict


def _loading(load: Callable[..., None], loading: Loading) -> Callable[..., None]:
    @functools.wraps(load)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        hook = self.register_load_state_dict_pre_hook(loading)
        try:
            load(self, state_dict)
        finally:
            hook.remove()

    return load_state_dict


@probe(
    "who saves optimizer states",
    "watch_optimizer_states",
    needed_for="optimizer.state_dict() that says whose pieces it has, and load_state_dict() that checks it",
    otherwise="one rank's state is loaded on another, where it has the same size",
)
def _saving_is_inherited() -> None:
    """Assumes: torch's optimizers inherit `state_dict` and `load_state_dict`."""
    for method in ("state_dict", "load_state_dict"):
        expect(_own_ones(torch.optim, Optimizer, method), [], f"the optimizers that have their own {method}")


@probe(
    "hooks of optimizer states",
    "watch_optimizer_states",
    needed_for="optimizer.state_dict() that says whose pieces it has, and load_state_dict() that checks it",
    otherwise="one rank's state is loaded on another, where it has the same size",
    when=When.DOCTOR,  # an optimizer's first state_dict() imports Dynamo
)
def _states_can_be_changed() -> None:
    """Assumes: hooks that are registered for the time of a call see what it returns, or change what it gets."""
    optimizer = torch.optim.SGD([tiny(requires_grad=True)], lr=0.5)

    def saved(optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["seen"] = True

    def loading(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        expect(state.pop("seen"), True, "what was saved")
        state["param_groups"][0]["lr"] = 0.25
        return state

    state = _saving(Optimizer.state_dict, saved)(optimizer)
    _loading(Optimizer.load_state_dict, loading)(optimizer, state)
    expect(optimizer.param_groups[0]["lr"], 0.25, "what was loaded")


# ---- initializers
Initializer = Callable[..., Any]


def replace_initializers(names: Sequence[str], around: Callable[[Initializer], Initializer]) -> None:
    """Put `around` around functions of torch.nn.init, for all who look them up there from now on."""
    for name in names:
        setattr(init, name, around(getattr(init, name)))


def before_counting_fans(stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have torch count a tensor's fans on what `stand_in` returns for it."""
    init._calculate_fan_in_and_fan_out = _fans_of(stand_in, init._calculate_fan_in_and_fan_out)


def _fans_of(stand_in: Callable[[torch.Tensor], torch.Tensor], fans: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fans)
    def counted(tensor: torch.Tensor) -> Any:
        return fans(stand_in(tensor))

    return counted


@probe(
    "fans of a parameter",
    "replace_initializers",
    "before_counting_fans",
    needed_for="torch.nn.init on sharded parameters",
    otherwise="xavier_uniform_() and others scale by the sizes of a rank's piece",
)
def _fans_are_counted_in_one_place() -> None:
    """Assumes: initializers that scale by fans look `_calculate_fan_in_and_fan_out` up in torch.nn.init when they
    run."""
    fans = init._calculate_fan_in_and_fan_out
    expect(_fans_of(lambda tensor: tiny(6).view(2, 3), fans)(tiny()), (3, 2), "the fans of a stand-in")

    def stop(tensor: torch.Tensor) -> torch.Tensor:
        raise _Counted  # before random numbers are drawn

    init._calculate_fan_in_and_fan_out = _fans_of(stop, fans)
    try:
        for initialize in (init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_):
            expect(_counts(initialize), True, f"whether {initialize.__name__} counts fans there")
    finally:
        init._calculate_fan_in_and_fan_out = fans


class _Counted(Exception):
    pass


def _counts(initialize: Initializer) -> bool:
    try:
        initialize(tiny(4).view(2, 2))
    except _Counted:
        return True
    return False
