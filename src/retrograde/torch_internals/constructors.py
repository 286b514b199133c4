"""`torch.tensor` and the like, which take anything as data and do not ask a tensor's class what they mean."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from retrograde.torch_internals.probes import When, expect, find, probe, tiny

CONSTRUCTORS = {"tensor": False, "as_tensor": True, "asarray": True}  # may it return what it is given?
# Others that copy or give out what they are given: where their names are, and these.
_COPYING: tuple[tuple[Any, str], ...] = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
)
_constructors: Callable[[], set[Any]] = find("torch.utils._device:_device_constructors")


def ask_in_constructors(cls: type[torch.Tensor]) -> None:
    """Have `torch.tensor`, `torch.as_tensor`, `torch.asarray` and `to_dlpack` ask this class of tensors, as other
    functions do.

    `torch.device(...)` as a context, TorchScript and Dynamo know functions by their identity. They must still know
    these."""
    _constructors()  # it caches what it finds, and at this moment it finds torch's own functions, as the context needs
    scripted = import_module("torch.jit._builtins")
    for name, may_return in CONSTRUCTORS.items():
        original = getattr(torch, name)
        asking = _asking(original, cls, may_return)
        setattr(torch, name, asking)
        known = (scripted._builtin_table or {}).get(id(original))
        if known is not None:  # otherwise it is yet to look, by names
            scripted._register_builtin(asking, known)
    for holder, name in _COPYING:
        setattr(holder, name, _asking(getattr(holder, name), cls, may_return=False))


def _asking(original: Callable[..., Any], cls: type[torch.Tensor], may_return: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, cls):
                if may_return and original(*args, **kwargs) is given:
                    return given
                return given.__torch_function__(original, (type(given),), args, kwargs)  # type: ignore[no-untyped-call]
        return original(*args, **kwargs)

    construct._torchdynamo_inline = original  # type: ignore[attr-defined]  # what Dynamo takes in its place
    return construct


@probe(
    "what tensors are made of",
    "ask_in_constructors",
    needed_for="torch.tensor(p), which is the whole on every rank",
    otherwise="torch.tensor(p) is this rank's piece",
    when=When.FIRST_USE,
)
def _constructors_can_be_asked() -> None:
    """Assumes: `torch.tensor`, `torch.as_tensor` and `torch.asarray` are names in torch that can be given to others,
    as is `to_dlpack`; `as_tensor` returns a tensor that needs no change;
    and a context of a device still knows what is behind them."""

    class AskedClass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func.__name__

    before = {name: vars(torch)[name] for name in CONSTRUCTORS}
    copying = [(holder, name, getattr(holder, name)) for holder, name in _COPYING]
    given = tiny().as_subclass(AskedClass)
    try:
        ask_in_constructors(AskedClass)
        asked = [torch.tensor(data=given), torch.as_tensor(given, dtype=torch.double), torch.asarray(given, copy=True)]
        asked += [getattr(holder, name)(given) for holder, name in _COPYING]
        kept = torch.as_tensor(given, device="cpu")
        with torch.device("meta"):
            where = [made.device.type for made in (torch.tensor(1), torch.as_tensor([1]), torch.asarray([1]))]
        plain = torch.tensor([1, 2], device="cpu").tolist()
    finally:
        for name, function in before.items():
            setattr(torch, name, function)
        for holder, name, function in copying:
            setattr(holder, name, function)
    names = [*CONSTRUCTORS, "_to_dlpack", "_to_dlpack"]
    expect(asked, names, "what a class of tensors is asked")
    expect(kept is given, True, "whether as_tensor() returns what it is given")
    expect(where, ["meta"] * 3, "where they make tensors in a context of a device")
    expect(plain, [1, 2], "what is made of a list")
