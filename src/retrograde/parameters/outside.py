"""Where torch hands a tensor to code that does not ask it (`__torch_function__`): a piece is refused there, by name.

| who                                   | would                                                   |
|---------------------------------------|---------------------------------------------------------|
| torch.distributed's collectives       | add up or overwrite other ranks' elements with these    |
| `torch.vmap`                          | map over this rank's elements as if they were rows      |
| `module.register_buffer(name, piece)` | save this rank's elements with the model                |

torch has a hook for buffers. The others are functions that torch's own modules look up by name when they run, so it is
these names that are wrapped, once for the process: `_check_single_tensor` and `_check_tensor_list`, which every
collective calls on its arguments, and `_add_batch_dim`, which vmap calls on each input.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed.distributed_c10d as collectives
from torch._functorch import vmap
from torch.nn.modules.module import register_module_buffer_registration_hook

from retrograde.errors import UnsupportedError
from retrograde.parameters.part import JOINED, Part


@functools.cache
def refuse_pieces_outside() -> None:
    """Install the checks, once for the process."""
    _look_first(collectives, "_check_single_tensor", lambda tensor: [tensor], _COLLECTIVE)
    _look_first(collectives, "_check_tensor_list", lambda tensors: tensors, _COLLECTIVE)
    _look_first(vmap, "_add_batch_dim", lambda tensor: [tensor], _VMAP)

    def buffer(module: Any, name: str, value: Any) -> None:
        _refuse(value, f"{type(module).__name__}.{name}, a buffer,", _BUFFER)

    register_module_buffer_registration_hook(buffer)


_COLLECTIVE = (
    "each rank has other elements of it, and retrograde has reduced its gradient already and given all ranks rank 0's "
    "values. For a number of the whole use p.grad.norm() and the like; for this rank's elements as a plain "
    "tensor p.grad.as_subclass(torch.Tensor)"
)
_VMAP = "its rows are not those of the parameter: use model.state_dict(), engine.full_grad(p) or module.weight"
_BUFFER = "it would be saved with the model as if it were all of it: use module.weight.detach().clone()"


def _look_first(where: Any, name: str, tensors: Callable[[Any], Iterable[Any]], why: str) -> None:
    original = getattr(where, name)

    @functools.wraps(original)
    def check(given: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors(given) if isinstance(given, list | tuple | torch.Tensor) else ():
            _refuse(tensor, "torch.vmap" if where is vmap else "a collective of torch.distributed", why)
        return original(given, *args, **kwargs)

    setattr(where, name, check)


def _refuse(tensor: Any, who: str, why: str) -> None:
    """Where a rank has everything there is nothing to refuse."""
    if not isinstance(tensor, Part) or tensor.unit.layout.world == 1:
        return
    of = "several parameters" if tensor.place == JOINED else f"parameter {tensor.slot.name}"
    raise UnsupportedError(f"rank {tensor.unit.rank}: {who} was given this rank's piece of {of}: {why}")
