"""What torch wants from a device in Python: its name, the module torch.late, the backend of process groups."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator import composites

_accelerator = torch.accelerator


def register(name: str, native: ModuleType) -> None:
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _module(name, native))
    torch.utils.generate_methods_for_privateuse1_backend()
    composites.register()

    def group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return native.make_group(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(name, group, devices=[name])


def _module(name: str, native: ModuleType) -> ModuleType:
    """torch.late, as torch.cuda. Whatever torch.accelerator has is taken from there."""
    module: Any = ModuleType(f"torch.{name}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = native.device_count
    module.current_device = _accelerator.current_device_index
    module.set_device = _accelerator.set_device_index
    module.synchronize = _accelerator.synchronize
    module.current_stream = _accelerator.current_stream
    module.set_stream = _accelerator.set_stream
    module.memory_allocated = _accelerator.memory_allocated
    module.max_memory_allocated = _accelerator.max_memory_allocated
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.stream = _stream
    module.device = lambda device: _accelerator.device_index(torch.device(name, _index(device)).index)
    module.default_stream = _default_stream
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    # Random operators draw from the CPU's generator, which whoever asks for these has seeded or saved already.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.zeros(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    return module


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return _accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _accelerator.current_device_index() if index is None else index


def _stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def _default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    privateuse1 = int(torch._C._autograd.DeviceType.PrivateUse1)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=privateuse1)
