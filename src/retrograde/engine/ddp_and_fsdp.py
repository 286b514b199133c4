"""DDP and FSDP around a sharded model are refused: they would reduce pieces of parameters as if they were parameters.

transformers' Trainer, Accelerate and Lightning Fabric wrap every model of a distributed run by themselves. Where all
pieces have the same size on all ranks nothing in torch would notice: rank 0's pieces overwrite those of the others.

torch has no hook for it, so three constructors are wrapped on their classes, once for the process. A class is
patched, not a name in a module, so that names imported before and subclasses come here as well. What this assumes of
torch: a DDP or FSDP module is made by its class's `__init__`, whose first argument after `self` is the module, and
`fully_shard` makes an `FSDPParam` of each parameter, which is its constructor's first argument.
FSDP takes seconds to import, so it is patched only where it is imported when `shard()` is called; after that its own
errors, about shapes, are what is left.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retrograde.errors import ShardingError, UnsupportedError
from retrograde.parameters import ShardedParameter

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_DTENSOR = "torch.distributed.tensor"
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_param"


def refuse_ddp_and_fsdp() -> None:
    """Make their constructors look for sharded parameters. Called by every `shard()`; patches each class once."""
    _guard(DistributedDataParallel, "module", _of_module)
    if _FSDP in sys.modules:
        _guard(sys.modules[_FSDP].FullyShardedDataParallel, "module", _of_module)
    if _FULLY_SHARD in sys.modules:
        _guard(sys.modules[_FULLY_SHARD].FSDPParam, "param", _of_param, "fully_shard")


def check_unwrapped(model: nn.Module) -> None:
    """The other way round: `shard()` of a model that DDP or FSDP has already."""
    wrappers: list[type[nn.Module]] = [DistributedDataParallel]
    if _FSDP in sys.modules:
        wrappers.append(sys.modules[_FSDP].FullyShardedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, tuple(wrappers)):
            inside = f"model.{name}.module" if name else "model.module"
            raise ShardingError(
                f"module {name or '(root)'} is a {type(module).__name__}, which reduces gradients itself: give "
                f"rg.shard() the plain model, as in {inside}"
            )
    if _DTENSOR not in sys.modules:
        return
    for name, param in model.named_parameters():
        if isinstance(param, sys.modules[_DTENSOR].DTensor):
            raise ShardingError(f"parameter {name} is a DTensor, sharded already: give rg.shard() the plain model")


Check = Callable[[Any, str], None]


def _guard(cls: type, argument: str, check: Check, called: str = "") -> None:
    """Let `check` see the constructor's first argument before torch does. `called`: what users know the class as."""
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]
    if getattr(original, "_retrograde_guard", False):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes one
        wrapped = args[0] if args else kwargs.get(argument)
        check(wrapped, called or type(self).__name__)
        original(self, *args, **kwargs)

    __init__._retrograde_guard = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]


def _of_module(module: Any, wrapper: str) -> None:
    if isinstance(module, nn.Module):
        _refuse_sharded(module.parameters(), wrapper)


def _of_param(param: Any, wrapper: str) -> None:
    _refuse_sharded([param], wrapper)


def _refuse_sharded(params: Iterable[Any], wrapper: str) -> None:
    for param in params:
        if isinstance(param, ShardedParameter):
            raise UnsupportedError(
                f"rank {param.unit.rank}: {wrapper} around parameter {param.slot.name}, which rg.shard() has sharded "
                f"already and whose gradients retrograde reduces: call the sharded model itself. Where a library wraps "
                f"it: with Accelerate use accelerator.prepare_model(model, evaluation_mode=True), with transformers' "
                f"Trainer first set trainer.accelerator.prepare_model to functools.partial(it, evaluation_mode=True), "
                f"with Lightning Fabric leave the model out of fabric.setup()"
            )
