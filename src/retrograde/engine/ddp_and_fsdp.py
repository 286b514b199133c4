"""DDP and FSDP around a sharded model are refused: they would reduce pieces of parameters as if they were parameters.

transformers' Trainer, Accelerate and Lightning Fabric wrap every model of a distributed run by themselves. Where all
pieces have the same size on all ranks nothing in torch would notice: rank 0's pieces overwrite those of the others.

torch has no hook for it, so three constructors are wrapped on their classes (torch_internals/wrapping.py). FSDP takes
seconds to import, so it is patched only where it is imported when `shard()` is called; after that its own errors, about
shapes, are what is left.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from retrograde.errors import ShardingError, UnsupportedError
from retrograde.parameters import ShardedParameter
from retrograde.torch_internals import before_ddp_and_fsdp, data_parallel_classes, is_dtensor


def refuse_ddp_and_fsdp() -> None:
    """Make the constructors of DDP and FSDP look for sharded parameters.
    Called by every `shard()`; patches each class once."""
    before_ddp_and_fsdp(_of_module, _of_param)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model for `shard()` of which DDP or FSDP has any part already."""
    wrappers = data_parallel_classes()
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            inside = f"model.{name}.module" if name else "model.module"
            raise ShardingError(
                f"module {name or '(root)'} is a {type(module).__name__}, which reduces gradients itself: give "
                f"rg.shard() the plain model, as in {inside}"
            )
    check_no_dtensors(model)


def check_no_dtensors(model: nn.Module) -> None:
    """Refuse parameters of fully_shard() or of tensor parallelism (docs/design/tensor_parallel.md)."""
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if is_dtensor(param):
                raise ShardingError(
                    f"parameter {name} of module {path or '(root)'} ({type(module).__name__}) is a DTensor, sharded "
                    f"already, by fully_shard() or tensor parallelism: give rg.shard() the plain model"
                )


def _of_module(module: Any, wrapper: str) -> None:
    if isinstance(module, nn.Module):
        _refuse_sharded(module.parameters(), wrapper)


def _of_param(param: Any, wrapper: str) -> None:
    _refuse_sharded([param], wrapper)


def _refuse_sharded(params: Iterable[Any], wrapper: str) -> None:
    for param in params:
        if isinstance(param, ShardedParameter):
            raise UnsupportedError(
                f"rank {param.unit.grid.rank}: {wrapper} around parameter {param.slot.name}, which rg.shard() has "
                f"sharded already and whose gradients retrograde reduces: call the sharded model itself. Where a "
                f"library wraps it: with Accelerate use accelerator.prepare_model(model, evaluation_mode=True), with "
                f"transformers' Trainer first set trainer.accelerator.prepare_model to functools.partial(it, "
                f"evaluation_mode=True), with Lightning Fabric leave the model out of fabric.setup()"
            )
