"""What is alive in this process, in bytes of tensors."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn


def settle() -> None:
    """Once in a process: have torch import what it imports late, and take all of it out of the way of gc."""
    import retrograde as rg

    assert rg.shard
    leaf = nn.Parameter(torch.ones(1))
    leaf.sum().backward()
    torch.optim.SGD([leaf]).step()
    gc.collect()
    gc.freeze()


def live_storages() -> dict[int, int]:
    """As `present_storages`, without what is only waiting for a collection."""
    gc.collect()
    return present_storages()


def present_storages() -> dict[int, int]:
    """Bytes of the storages of numbers that Python has not let go of, by address. Control messages are bytes and come
    and go when they like; parameters, gradients, pages and buckets are floating point."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if not issubclass(type(item), Tensor) or type(item).__module__.startswith("torch._subclasses"):
                continue  # the latter are tensors without memory, left by torch.compile
            if torch._C._functorch.is_functorch_wrapped_tensor(item):
                continue  # as are these, of transforms that it traced
            if item.device.type == "cpu" and item.is_floating_point():
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live_bytes() -> int:
    return sum(live_storages().values())
