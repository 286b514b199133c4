"""Models on the meta device: made real one module at a time, so that no rank ever holds the whole.

Modules are reset in the order in which constructing them would have drawn random numbers (children before
parents), so with the same seed the values are those of the model built on a real device, at any world size. Where the
user says how (`init`), they are those that `model.apply(init)` gives it there. A module that is reset after those in it
may set their parameters again: one at a time is made whole for it.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from retrograde.errors import ShardingError
from retrograde.torch_internals import (
    forget_weight_references,
    own_buffers,
    own_parameters,
    reset_of,
    tree_leaves,
    tree_map_only,
)

Initializer = Callable[[nn.Module], object]  # gives a module's own parameters and buffers their first values
MoveIn = Callable[[nn.Parameter, torch.Tensor], None]


def materialize(model: nn.Module, device: torch.device, move_in: MoveIn, init: Initializer | None = None) -> None:
    """Reset every module that has parameters on the meta device, or in which all were; `move_in` makes a parameter real
    with its first value, and may be called again with another."""
    given = _Given(model, device, move_in)
    if all(map(_is_meta, model.parameters())):
        _bring_buffers(model, device)
    for module in dict.fromkeys(_construction_order(model)):  # a shared one is made once
        own = {key: p for key, p in own_parameters(module).items() if p is not None and given.here(p)}
        buffers = {key: b for key, b in own_buffers(module).items() if b is not None and _is_meta(b)}
        reset = _reset_of(module, init)
        if reset is None or not (own or buffers or given.all_of(module)):
            continue
        forget_weight_references(module)  # access.py serves them
        for key, buffer in buffers.items():
            own_buffers(module)[key] = _undefined(buffer, device)
        for key, param in own.items():
            # A scratch parameter: a tied weight draws its random numbers as it would have, and is discarded.
            own_parameters(module)[key] = given.scratch(param)
        with torch.no_grad(), given.shown_below(module):
            reset()
        for key, param in own.items():
            made, own_parameters(module)[key] = own_parameters(module)[key], param
            if made is not None and _is_meta(param):
                move_in(param, made)
            del made  # before the next module is made


def _bring_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers that are real already, as tables of angles may be, to where the parameters will be."""
    moved: dict[int, torch.Tensor] = {}  # several modules may have one
    for module in model.modules():
        for key, buffer in own_buffers(module).items():
            if buffer is not None and not _is_meta(buffer):
                own_buffers(module)[key] = moved.setdefault(id(buffer), buffer.to(device))


class _Given:
    """The parameters that began on the meta device. Of those that are real by now this rank has only its part."""

    def __init__(self, model: nn.Module, device: torch.device, move_in: MoveIn) -> None:
        named = [(name, param) for name, param in model.named_parameters() if _is_meta(param)]
        self._shapes = {id(param): torch.empty_like(param) for _, param in named}
        self._names = {id(param): name for name, param in named}
        self._device = device
        self._move_in = move_in
        self._whole: _Whole | None = None  # one at a time

    def here(self, param: nn.Parameter) -> bool:
        return id(param) in self._shapes

    def all_of(self, module: nn.Module) -> bool:
        """Has this module, with what it contains, parameters, and did all of them begin on the meta device?"""
        params = list(module.parameters())
        return bool(params) and all(map(self.here, params))

    def scratch(self, param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(_undefined(self._shapes[id(param)], self._device), param.requires_grad)

    @contextmanager
    def shown_below(self, module: nn.Module) -> Iterator[None]:
        """While a module is reset, show it the parameters of those in it whole when it looks."""
        tables = [own_parameters(each) for each in module.modules() if each is not module]
        below = [(table, key, p) for table in tables for key, p in table.items() if p is not None and self.here(p)]
        shown = [
            _Below.of(self._shapes[id(param)], param.requires_grad, partial(self._whole_of, module, param))
            for _, _, param in below
        ]
        for (table, key, _), shape in zip(below, shown, strict=True):
            table[key] = shape
        try:
            yield
            self._settle()
            for (table, key, param), shape in zip(below, shown, strict=True):
                if table[key] is not shape:
                    self._refuse(module, param)
        finally:
            self._whole = None
            for table, key, param in below:
                table[key] = param

    def _whole_of(self, module: nn.Module, param: nn.Parameter) -> "_Whole":
        if self._whole is None or self._whole.param is not param:
            self._settle()
            self._whole = _Whole(module, param, self.scratch(param))
        return self._whole

    def _settle(self) -> None:
        """Let go of a parameter that has been looked at: if it was set, this rank's part is what it became."""
        whole, self._whole = self._whole, None
        if whole is None or not whole.used:
            return
        if not _can_be_nan(whole.value) or whole.value.isnan().any():
            self._refuse(whole.module, whole.param)
        self._move_in(whole.param, whole.value)

    def _refuse(self, module: nn.Module, param: nn.Parameter) -> NoReturn:
        raise ShardingError(
            f"parameter {self._names[id(param)]} of a model on the meta device: the reset of {type(module).__name__}, "
            f"which contains it, reads it, sets a part of it or puts another in its place, and a rank has only its own "
            f"part by then; do so after rg.shard(), where nn.init and other edits are those of one device"
        )


class _Whole:
    """A parameter as the reset of a module around it sees it."""

    def __init__(self, module: nn.Module, param: nn.Parameter, value: nn.Parameter) -> None:
        self.module = module
        self.param = param
        self.value = value
        self.used = False  # for more than its shape


class _Below(nn.Parameter):
    """Stands for a parameter: every function gets the whole, whose elements are nan until they are set."""

    _whole: Callable[[], _Whole]

    @staticmethod
    def of(shape: torch.Tensor, requires_grad: bool, whole: Callable[[], _Whole]) -> "_Below":
        made = _Below(shape, requires_grad)
        made._whole = whole
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Below)]
        args, kwargs = tree_map_only(_Below, lambda below: below._whole().value, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if any(isinstance(each, torch.Tensor) for each in tree_leaves(result)):
            for below in found:
                below._whole().used = True
        return result


def check_resettable(model: nn.Module, elsewhere: Collection[int], init: Initializer | None = None) -> None:
    """Refuse modules that cannot be reset, before anything is changed. `elsewhere`: the identities of parameters that
    get their values from elsewhere."""
    for name, module in model.named_modules():
        own = [param for param in own_parameters(module).values() if param is not None and _is_meta(param)]
        buffers = [buffer for buffer in own_buffers(module).values() if buffer is not None and _is_meta(buffer)]
        needed = buffers or any(id(param) not in elsewhere for param in own)
        if needed and _reset_of(module, init) is None:
            raise ShardingError(
                f"module {name or '(root)'} ({type(module).__name__}) has parameters or buffers on the meta device but "
                f"no reset_parameters(); give it one, say how with init= (a function of a module, for transformers "
                f"init=model._init_weights), or build the model on a real device"
            )


def _undefined(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a tensor in which what nobody sets is seen: its elements are nan, where the dtype has that, else 0."""
    made = torch.empty_like(like, device=device)
    return made.fill_(math.nan) if _can_be_nan(made) else made.zero_()


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _construction_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _construction_order(child)
    yield module


def _reset_of(module: nn.Module, init: Initializer | None) -> Callable[[], object] | None:
    return reset_of(module) if init is None else partial(init, module)
