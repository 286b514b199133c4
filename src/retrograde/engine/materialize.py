"""Models on the meta device: made real one module at a time, so that no rank ever holds the whole.

Modules are reset in the order in which constructing them would have drawn random numbers (children before
parents), so with the same seed the values are those of the model built on a real device, at any world size.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from retrograde.errors import ShardingError


def materialize(
    model: nn.Module, on_meta: set[int], settle: Callable[[nn.Parameter, torch.Tensor], None]
) -> None:
    """Reset every module that has parameters in `on_meta` and hand each value to `settle`, once."""
    done: set[int] = set()
    for name, module in _construction_order(model, ""):
        own = {key: p for key, p in module._parameters.items() if p is not None and id(p) in on_meta}
        buffers = {key: b for key, b in module._buffers.items() if b is not None and b.device.type == "meta"}
        if not own and not buffers:
            continue
        for key, buffer in buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
        for key, param in own.items():
            # A scratch parameter: a tied weight draws its random numbers as it would have, and is discarded.
            module._parameters[key] = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
        _reset(name, module)
        scratch = {key: module._parameters[key] for key in own}
        module._parameters.update(own)
        for key, param in own.items():
            value = scratch[key]
            assert value is not None
            if id(param) not in done:
                done.add(id(param))
                settle(param, value)


def _construction_order(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _construction_order(child, f"{name}.{key}" if name else key)
    yield name, module


def _reset(name: str, module: nn.Module) -> None:
    for method in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, method, None)
        if callable(reset):
            with torch.no_grad():
                reset()
            return
    raise ShardingError(
        f"module {name or '(root)'} ({type(module).__name__}) has parameters or buffers on the meta device but no "
        f"reset_parameters(); give it one, or build the model on a real device"
    )
