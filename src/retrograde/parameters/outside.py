"""Refuses sharded tensors, by name, where torch hands a tensor to code that does not ask `__torch_function__`.

`torch.tensor`, `torch.as_tensor`, `torch.asarray` and `to_dlpack` do not ask it either.
torch_internals makes them ask, and they get the whole.

| this code                             | would, if it were given a piece,                        |
|---------------------------------------|---------------------------------------------------------|
| torch.distributed's collectives       | add up or overwrite other ranks' elements with these    |
| `torch.vmap`                          | map over this rank's elements as if they were rows      |
| `torch.func.grad`, `vjp`, `jvp`, ...  | differentiate by this rank's elements, as a vector      |
| `module.register_buffer(name, piece)` | save this rank's elements with the model                |

torch has a hook for buffers. For the others its own modules are changed, once for the process (torch_internals).
"""

import functools
from typing import Any

from torch.nn.modules.module import register_module_buffer_registration_hook

from retrograde.errors import UnsupportedError
from retrograde.parameters.part import Part
from retrograde.torch_internals import ask_in_constructors, before_collectives, before_derivatives, before_vmap


@functools.cache
def refuse_pieces_outside() -> None:
    """Install the checks, once for the process."""

    def collective(tensors: list[Any]) -> None:
        for tensor in tensors:
            _refuse(tensor, "a collective of torch.distributed", _COLLECTIVE)

    def buffer(module: Any, name: str, value: Any) -> None:
        _refuse(value, f"{type(module).__name__}.{name}, a buffer,", _BUFFER)

    before_collectives(collective)
    ask_in_constructors(Part)
    before_vmap(lambda given: _refuse_to_transform(given, "torch.vmap", _VMAP))
    before_derivatives(lambda given: _refuse_to_transform(given, _DERIVATIVES, _DERIVATIVE))
    register_module_buffer_registration_hook(buffer)


_COLLECTIVE = (
    "each rank has other elements of it, and retrograde has reduced its gradient already and given all ranks rank 0's "
    "values. For a number of the whole use p.grad.norm() and the like; for this rank's elements as a plain "
    "tensor p.grad.local"
)
_VMAP = "its rows are not those of the parameter: use p.full_tensor(), p.grad.full_tensor() or module.weight"
_DERIVATIVES = "torch.func (grad, vjp, jvp or what is made of them)"
_DERIVATIVE = (
    "it would be a vector of these elements: use p.full_tensor(), p.grad.full_tensor() or module.weight, for all "
    "parameters those of engine.full_params()"
)
_BUFFER = "it would be saved with the model as if it were all of it: use module.weight.detach().clone()"


def _refuse(tensor: Any, who: str, why: str) -> None:
    """Raise if the tensor is sharded, unless this rank has all of it."""
    if isinstance(tensor, Part) and tensor.unit.layout.world > 1:
        raise _refusal(tensor, who, why)


def _refuse_to_transform(tensor: Any, who: str, why: str) -> None:
    """Raise if the tensor is sharded. A transform sees its memory, which has one dimension: what is all of a parameter
    passes only if that is a vector."""
    if isinstance(tensor, Part) and (tensor.unit.layout.world > 1 or tensor.dim() != 1):
        raise _refusal(tensor, who, why)


def _refusal(tensor: Part, who: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"rank {tensor.unit.grid.rank}: {who} was given this rank's piece of parameter {tensor.slot.name}: {why}"
    )
