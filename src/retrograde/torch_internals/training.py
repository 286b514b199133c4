"""Training: runs code around clipping, zeroing gradients, updates and states of optimizers, whoever calls these.

torch has no hooks for these, so its own functions and classes are changed, once for the process.
"""

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from retrograde.errors import InternalsChanged
from retrograde.torch_internals.probes import When, expect, probe, tiny

# ---- clipping
SeeParameters = Callable[[list[torch.Tensor]], None]
Clip = Callable[..., Any]  # torch's own: takes what `clip_grad_norm_` and `clip_grad_value_` take
_CLIP_NORM_TAKES = ["parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach"]


def around_clipping(before: SeeParameters, clip_norm: Callable[..., Any]) -> None:
    """Have `before(parameters)` run before torch clips the gradients of these parameters, and norms clipped by
    `clip_norm(torch's own, parameters, ...)`, with torch's further arguments."""
    norm, value = (_cell_of(public) for public in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_))
    norm.cell_contents = _around(norm.cell_contents, before, clip_norm)
    value.cell_contents = _around(value.cell_contents, before, _as_torch_does)


def _as_torch_does(inner: Clip, parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    return inner(parameters, *args, **kwargs)


def _cell_of(public: Any) -> types.CellType:
    """The cell of a function's closure with the function that does the work."""
    cells: tuple[types.CellType, ...] = public.__closure__ or ()
    inner = cells[0].cell_contents if len(cells) == 1 else None
    if not isinstance(inner, types.FunctionType) or inner.__name__ != public.__name__:
        raise InternalsChanged(f"torch.nn.utils.{public.__name__} is no longer a closure over what it does")
    return cells[0]


def _around(inner: Clip, before: SeeParameters, run: Callable[..., Any]) -> Clip:
    @functools.wraps(inner)
    def clip(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            given = [parameters]
        else:
            given = list(parameters)
        if not given:
            return inner(parameters, *args, **kwargs)  # torch warns of an empty generator, which it still is
        before(given)
        return run(inner, given, *args, **kwargs)

    return clip


@probe(
    "how gradients are clipped",
    "around_clipping",
    needed_for="clipping on a rank that has no gradient where others have one, and in one meeting",
    otherwise="the other ranks wait for it until their time is up",
)
def _clipping_is_a_closure() -> None:
    """Assumes: `clip_grad_norm_` and `clip_grad_value_` are closures over the functions that do the work, so that
    changing the cell reaches everybody, however the name was imported and when; the first takes the arguments that it
    took in torch 2.13."""
    expect(
        list(inspect.signature(clip_grad.clip_grad_norm_).parameters), _CLIP_NORM_TAKES, "what clip_grad_norm_ takes"
    )
    seen: list[Any] = []
    for public in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_):
        cell = _cell_of(public)
        inner = cell.cell_contents
        cell.cell_contents = _around(inner, seen.extend, _as_torch_does)
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
AroundParameters = Callable[[list[torch.Tensor]], AbstractContextManager[None]]


def around_zero_grad(context: AroundParameters) -> None:
    """Have any optimizer's or module's `zero_grad()` run inside `context(parameters)`."""
    Optimizer.zero_grad = _zeroing_optimizer(Optimizer.zero_grad, context)  # type: ignore[method-assign]
    nn.Module.zero_grad = _zeroing_module(nn.Module.zero_grad, context)  # type: ignore[method-assign]


def _zeroing_optimizer(zero: Callable[..., None], context: AroundParameters) -> Callable[..., None]:
    @functools.wraps(zero)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        with context([param for group in self.param_groups for param in group["params"]]):
            zero(self, set_to_none)

    return zero_grad


def _zeroing_module(zero: Callable[..., None], context: AroundParameters) -> Callable[..., None]:
    @functools.wraps(zero)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        with context(list(self.parameters())):
            zero(self, set_to_none)

    return zero_grad


@probe(
    "who zeroes gradients",
    "around_zero_grad",
    needed_for="zero_grad() on a rank that has no gradient where others have one, and at the cost of plain tensors",
    otherwise="gradients of other ranks' backwards arrive after zero_grad()",
)
def _zeroing_is_inherited() -> None:
    """Assumes: torch's optimizers and modules inherit `zero_grad`. A class that has its own and does not call torch's
    is not seen."""
    expect(_own_ones(torch.optim, Optimizer, "zero_grad"), [], "the optimizers that have their own")
    expect(_own_ones(nn, nn.Module, "zero_grad"), [], "the modules that have their own")


def _own_ones(where: Any, base: type, method: str) -> list[str]:
    """The names of classes in a module that derive from `base` and do not inherit its method."""
    classes = [each for each in vars(where).values() if isinstance(each, type) and issubclass(each, base)]
    return [each.__name__ for each in classes if getattr(each, method) is not getattr(base, method)]


# ---- updates
Step = Callable[..., Any]
AroundUpdate = Callable[[Step, Optimizer, Any, Any], Any]
_HOOKED = Optimizer.profile_hook_step(lambda optimizer: None).__code__  # of what torch puts around every `step`
_AROUND = "_retrograde_around"


def around_updates(around: AroundUpdate, not_found: Callable[[Optimizer], None]) -> None:
    """Have `around(step, optimizer, args, kwargs)` called in place of what any optimizer's `step()` does between its
    hooks, whoever wrote the optimizer. It calls `step(optimizer, *args, **kwargs)`.

    `not_found` is called for an optimizer whose class hides what torch has put around its `step`."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        wrappers = [_hooked_in(cls.__dict__.get("step")) for cls in type(optimizer).__mro__]
        for wrapper in wrappers:
            if wrapper is not None:
                _put_around(wrapper, around)
        if not any(wrappers):
            not_found(optimizer)

    register_optimizer_step_pre_hook(before)


def _hooked_in(step: Any) -> Any:
    """torch's wrapper, which runs hooks, under what others (Dynamo) have put around it; None if there is none."""
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None)
    return step


def _put_around(hooked: Any, around: AroundUpdate) -> None:
    """Put `around` around the function inside torch's wrapper `hooked`, which looks it up after it has called hooks."""
    (cell,) = hooked.__closure__
    step: Step = cell.cell_contents
    if _is_around(around, step):
        return

    @functools.wraps(step)
    def update(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return around(step, optimizer, args, kwargs)

    setattr(update, _AROUND, around)
    cell.cell_contents = update


def _is_around(around: AroundUpdate, step: Step | None) -> bool:
    """Is `around` already put around `step`, directly or under other wrappers?"""
    while step is not None:
        if getattr(step, _AROUND, None) is around:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def original_of(step: Step) -> Step:
    """The function that was written as `step`, without what torch and others have put around it."""
    written: Step = inspect.unwrap(step)
    return written


def prepares_as(cls: type[Optimizer], known: type[Optimizer]) -> bool:
    """Does a class of optimizers collect gradients and make state as another one does?"""
    one: Any = cls
    other: Any = known
    return original_of(one._init_group) is original_of(other._init_group)  # Dynamo wraps each class's own


def _bare(cls: type[Optimizer]) -> Optimizer:
    """Make an optimizer without `__init__`, in which torch would import Dynamo."""
    optimizer = cls.__new__(cls)
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    optimizer.param_groups = []
    return optimizer


@probe(
    "what an optimizer does between its hooks",
    "around_updates",
    "original_of",
    "prepares_as",
    needed_for="ranks that meet before an update, and updates of plain local tensors",
    otherwise="an update writes weights that other ranks still read",
)
def _updates_are_closures() -> None:
    """Assumes: torch puts a wrapper with hooks around `step` of every optimizer's class, a closure over the function
    inside it, which it looks up after the hooks that run before it. torch's own make their state in one method."""
    calls: list[str] = []

    def written(self: Optimizer) -> None:
        calls.append("step")

    class Probed(Optimizer):
        step: Any = functools.wraps(written)(Optimizer.profile_hook_step(written))  # as Dynamo wraps some

    optimizer = _bare(Probed)

    def around(step: Step, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        calls.append("around")
        return step(optimizer, *args, **kwargs)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("before")
        _put_around(_hooked_in(Probed.__dict__["step"]), around)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    optimizer.step()
    expect(calls, ["before", "around", "step", "after"] * 2, "what runs in two steps")
    expect(original_of(Probed.step) is written, True, "whether the function that was written is found")
    expect(prepares_as(torch.optim.AdamW, torch.optim.Adam), True, "whether AdamW makes state as Adam does")
    expect(prepares_as(torch.optim.SGD, torch.optim.Adam), False, "whether SGD makes state as Adam does")


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
