"""Runs code before DDP, FSDP, parametrizations and transforms of torch.func take a model, a parameter or a tensor.

torch has no hooks for these. A class is changed, not a name in a module, so that names imported before and subclasses
come here as well. FSDP takes seconds to import, so it is changed only where it is imported already.
"""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from retrograde.torch_internals.probes import When, expect, probe, tiny

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_param"
_DTENSOR = "torch.distributed.tensor"

# ---- DDP and FSDP
SeeArgument = Callable[[Any, str], None]


def before_ddp_and_fsdp(of_module: SeeArgument, of_parameter: SeeArgument) -> None:
    """Have `of_module(module, wrapper)` or `of_parameter(parameter, wrapper)` run before one of these takes it.

    Each class is changed once. A second call changes classes that were imported since the first."""
    _guard(DistributedDataParallel, "module", of_module)
    if _FSDP in sys.modules:
        _guard(sys.modules[_FSDP].FullyShardedDataParallel, "module", of_module)
    if _FULLY_SHARD in sys.modules:
        _guard(sys.modules[_FULLY_SHARD].FSDPParam, "param", of_parameter, "fully_shard")


def _guard(cls: type, argument: str, look: SeeArgument, called: str = "") -> None:
    """Have `look` see the constructor's first argument before torch does. `called`: the name that users know."""
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]
    if getattr(original, "_retrograde_guard", False):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes one
        wrapped = args[0] if args else kwargs.get(argument)
        look(wrapped, called or type(self).__name__)
        original(self, *args, **kwargs)

    __init__._retrograde_guard = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]


def data_parallel_classes() -> tuple[type[nn.Module], ...]:
    """The imported classes of models that reduce gradients themselves."""
    fsdp = [sys.modules[_FSDP].FullyShardedDataParallel] if _FSDP in sys.modules else []
    return (DistributedDataParallel, *fsdp)


def is_dtensor(tensor: torch.Tensor) -> bool:
    return _DTENSOR in sys.modules and isinstance(tensor, sys.modules[_DTENSOR].DTensor)


class _Seen(Exception):
    pass


def _see(given: Any, wrapper: str = "") -> None:
    raise _Seen(wrapper)


def _seen_by(run: Callable[[], Any]) -> str | None:
    """Run something, and return the name of the wrapper whose constructor was seen; None if none was."""
    try:
        run()
    except _Seen as seen:
        return str(seen)
    return None


@probe(
    "how DDP is made",
    "before_ddp_and_fsdp",
    "data_parallel_classes",
    needed_for="refusing DDP around a sharded model, which libraries put there by themselves",
    otherwise="rank 0's pieces overwrite those of the others",
)
def _ddp_has_a_constructor() -> None:
    """Assumes: a DDP module is made by its class's `__init__`, whose first argument is the module."""
    _probe_constructor(DistributedDataParallel, lambda: DistributedDataParallel(nn.Module()))


@probe(
    "how FSDP is made",
    "before_ddp_and_fsdp",
    "data_parallel_classes",
    "is_dtensor",
    needed_for="refusing FSDP around a sharded model, which libraries put there by themselves",
    otherwise="errors that speak of shapes, or pieces of pieces",
    when=When.DOCTOR,  # FSDP takes seconds to import
)
def _fsdp_has_a_constructor() -> None:
    """Assumes: an FSDP module is made by its class's `__init__`, whose first argument is the module, and `fully_shard`
    makes an `FSDPParam` of each parameter, by the `__init__` of that class, whose first argument is the parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    expect([name in sys.modules for name in (_FSDP, _FULLY_SHARD, _DTENSOR)], [True] * 3, "which modules there are")
    expect(FullyShardedDataParallel in data_parallel_classes(), True, "whether FSDP is where it is looked for")
    expect(is_dtensor(tiny()), False, "whether a plain tensor is a DTensor")
    _probe_constructor(FullyShardedDataParallel, lambda: FullyShardedDataParallel(nn.Module()))
    expect(vars(_fsdp_param_group)["FSDPParam"] is _fsdp_param.FSDPParam, True, "whether fully_shard() uses this class")
    _probe_constructor(_fsdp_param.FSDPParam, lambda: _fsdp_param.FSDPParam(*[None] * 8))  # type: ignore[arg-type]


def _probe_constructor(cls: type, make: Callable[[], Any]) -> None:
    """Guard a class for a moment, as if it had no guard yet, and check that its constructor is seen."""
    before = vars(cls)["__init__"]
    plain: Any = lambda self, *args, **kwargs: before(self, *args, **kwargs)  # noqa: E731 - one that is not guarded
    cls.__init__ = plain  # type: ignore[misc]
    try:
        _guard(cls, "module", _see)
        expect(_seen_by(make), cls.__name__, "the constructor that was seen")
    finally:
        cls.__init__ = before  # type: ignore[misc]


# ---- parametrizations
def before_parametrizing(look: Callable[[Any], None]) -> None:
    """Have `look(parameter)` run before a parametrization is registered for it."""
    original = ParametrizationList.__init__

    @functools.wraps(original)
    def __init__(self: Any, modules: Any, parametrized: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        look(parametrized)
        original(self, modules, parametrized, *args, **kwargs)

    ParametrizationList.__init__ = __init__  # type: ignore[method-assign, assignment]


@probe(
    "how parametrizations are made",
    "before_parametrizing",
    needed_for="refusing parametrizations of sharded parameters",
    otherwise="errors that speak of leaves and detach()",
)
def _parametrizations_are_lists() -> None:
    """Assumes: `register_parametrization` hands what it parametrizes to `ParametrizationList` as the second argument,
    before anything of the module has changed."""
    original = ParametrizationList.__init__
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(tiny()))
    weight = module.weight
    seen: list[Any] = []

    def look(parametrized: Any) -> None:
        seen.append(parametrized)
        raise _Seen

    before_parametrizing(look)
    try:
        _seen_by(lambda: nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity()))
    finally:
        ParametrizationList.__init__ = original  # type: ignore[method-assign]
    expect(len(seen) == 1 and seen[0] is weight, True, "whether the parameter was seen")
    expect(type(module) is nn.Module and module.weight is weight, True, "whether the module is as it was")


# ---- transforms of torch.func
def before_vmap(look: Callable[[Any], None]) -> None:
    """Have `look(input)` run before vmap makes a batch of it."""
    vmap = _vmap()
    vmap._add_batch_dim = _looking(vmap._add_batch_dim, look)


def _vmap() -> Any:
    return import_module("torch._functorch.vmap")


def _looking(take: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(take)
    def look_first(given: Any, *args: Any, **kwargs: Any) -> Any:
        look(given)
        return take(given, *args, **kwargs)

    return look_first


@probe(
    "what vmap is given",
    "before_vmap",
    needed_for="refusing a rank's piece of a parameter in torch.vmap",
    otherwise="vmap maps over a rank's elements as if they were rows of the parameter",
)
def _vmap_makes_batches() -> None:
    """Assumes: vmap looks `_add_batch_dim` up in its module when it runs, and calls it on each input."""
    original = _vmap()._add_batch_dim
    given = tiny()
    seen: list[Any] = []
    before_vmap(seen.append)
    try:
        torch.func.vmap(torch.neg)(given)
    finally:
        _vmap()._add_batch_dim = original
    expect(len(seen) == 1 and seen[0] is given, True, "whether its input was seen")


def before_derivatives(look: Callable[[Any], None]) -> None:
    """Have `look(input)` run before grad, vjp, jvp or what is made of them takes an input or a tangent.

    Dynamo traces through them and knows their functions by name, so what is changed is below those."""
    transforms, forward = _transforms(), _forward()
    transforms._wrap_for_grad = _looking(transforms._wrap_for_grad, look)
    make_dual = forward._make_dual_impl

    @functools.wraps(make_dual)
    def look_first(tensor: Any, tangent: Any, **kwargs: Any) -> Any:
        look(tensor)
        look(tangent)
        return make_dual(tensor, tangent, **kwargs)

    forward._make_dual_impl = look_first


def _transforms() -> Any:
    return import_module("torch._functorch.eager_transforms")


def _forward() -> Any:
    return import_module("torch._functorch.predispatch")


def _seen_before(run: Callable[[], Any]) -> list[Any]:
    """What is seen before `run` takes it. It gets no further: there is no backward, for which torch starts threads."""
    before = _transforms()._wrap_for_grad, _forward()._make_dual_impl
    seen: list[Any] = []

    def look(taken: Any) -> None:
        seen.append(taken)
        raise _Seen

    before_derivatives(look)
    try:
        _seen_by(run)
    finally:
        _transforms()._wrap_for_grad, _forward()._make_dual_impl = before
    return seen


@probe(
    "what derivatives are given",
    "before_derivatives",
    needed_for="refusing a rank's piece of a parameter in torch.func.grad, vjp and what is made of them",
    otherwise="derivatives are those of a rank's elements, in another shape and with other values on each rank",
)
def _derivatives_wrap_their_inputs() -> None:
    """Assumes: torch.func.grad and vjp look `_wrap_for_grad` up in their module when they run, and call it on each
    input."""
    given = tiny()
    seen = _seen_before(lambda: torch.func.grad(torch.sum)(given)) + _seen_before(
        lambda: torch.func.vjp(torch.sum, given)
    )
    expect([each is given for each in seen], [True, True], "whether the inputs of grad and vjp were seen")


@probe(
    "what forward derivatives are given",
    "before_derivatives",
    needed_for="refusing a rank's piece of a parameter in torch.func.jvp and what is made of it",
    otherwise="errors that speak of storages",
    when=When.DOCTOR,  # the first forward derivative compiles decompositions
)
def _forward_derivatives_make_duals() -> None:
    """Assumes: forward derivatives look `_make_dual_impl` up in the module `predispatch` when they run, and call it on
    each input with its tangent."""
    given = tiny()
    seen = _seen_before(lambda: torch.func.jvp(torch.sum, (given,), (tiny(),)))
    expect([each is given for each in seen], [True], "whether the input of jvp was seen")
