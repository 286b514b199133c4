"""Models on the meta device: made real one module at a time, so that no rank ever holds the whole.

Modules are reset in the order in which constructing them would have drawn random numbers (children before
parents), so with the same seed the values are those of the model built on a real device, at any world size.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from retrograde.errors import ShardingError
from retrograde.torch_internals import forget_weight_references, own_buffers, own_parameters, reset_of


def materialize(model: nn.Module, device: torch.device, move_in: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
    """Reset every module that has parameters on the meta device; `move_in` makes each real with its first value."""
    shapes = {id(p): torch.empty_like(p) for p in model.parameters() if p.device.type == "meta"}
    for module in dict.fromkeys(_construction_order(model)):  # a shared one is made once
        own = {key: p for key, p in own_parameters(module).items() if p is not None and id(p) in shapes}
        buffers = {key: b for key, b in own_buffers(module).items() if b is not None and b.device.type == "meta"}
        if not own and not buffers:
            continue
        forget_weight_references(module)  # access.py serves them
        for key, buffer in buffers.items():
            own_buffers(module)[key] = torch.empty_like(buffer, device=device)
        for key, param in own.items():
            # A scratch parameter: a tied weight draws its random numbers as it would have, and is discarded.
            scratch = torch.empty_like(shapes[id(param)], device=device)
            own_parameters(module)[key] = nn.Parameter(scratch, param.requires_grad)
        with torch.no_grad():
            _reset_of(module)()
        for key, param in own.items():
            made, own_parameters(module)[key] = own_parameters(module)[key], param
            if made is not None and param.device.type == "meta":
                move_in(param, made)
            del made  # before the next module is made


def check_resettable(model: nn.Module, elsewhere: Collection[int]) -> None:
    """Refuse before anything is changed. `elsewhere`: the identities of parameters that get their values there."""
    for name, module in model.named_modules():
        own = [param for param in own_parameters(module).values() if param is not None and _is_meta(param)]
        buffers = [buffer for buffer in own_buffers(module).values() if buffer is not None and _is_meta(buffer)]
        if buffers or any(id(param) not in elsewhere for param in own):
            _reset_of(module, name)


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _construction_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _construction_order(child)
    yield module


def _reset_of(module: nn.Module, name: str = "") -> Callable[..., object]:
    reset = reset_of(module)
    if reset is not None:
        return reset
    raise ShardingError(
        f"module {name or '(root)'} ({type(module).__name__}) has parameters or buffers on the meta device but no "
        f"reset_parameters(); give it one, or build the model on a real device"
    )
