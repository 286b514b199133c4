"""Live tensor bytes, counted at every operation: what autograd, Python or anybody else still refers to."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Storages that were made inside. `ignored` are not counted (parameters, gradients, buffers of a transport)."""

    def __init__(self, peak: bool = False) -> None:
        """With `peak`, everything alive is counted after each operation, which is slow."""
        super().__init__()
        self._counts_peak = peak
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._ignored: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.read: set[int] = set()  # storages that an operation took as an argument

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        if self._counts_peak:
            self.peak = max(self.peak, self.bytes())
        return result

    def watch(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return  # its storage has a size, and no memory
        storage = tensor.untyped_storage()
        self._seen.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def ignore(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._ignored[storage._cdata] = StorageWeakRef(storage)

    def alive(self) -> dict[int, int]:
        """Storage -> bytes. An address is used again only when every weak reference to its storage is gone."""
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        self._ignored = {key: entry for key, entry in self._ignored.items() if not entry.expired()}
        return {key: nbytes for key, (_, nbytes) in self._seen.items() if key not in self._ignored}

    def bytes(self) -> int:
        return sum(self.alive().values())

    def restart_peak(self) -> None:
        self.peak = self.bytes()
