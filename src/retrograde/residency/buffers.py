"""Flat buffers that are used again: fresh ones cost page faults, and pages and buckets come and go all step."""

import torch

from retrograde.ledger import Ledger


class BufferPool:
    """Free buffers stay only while everything taken and free together fits in `limit` bytes."""

    def __init__(self, ledger: Ledger) -> None:
        self.limit = 0.0
        self._ledger = ledger
        self._free: list[torch.Tensor] = []
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        need = numel * dtype.itemsize
        self._used += need
        for index, buffer in enumerate(self._free):
            if buffer.numel() == numel and buffer.dtype == dtype and buffer.device == device:
                return self._free.pop(index)
        while self._free and self._held > self.limit:
            self._ledger.hold(-self._free.pop(0).nbytes)
        self._ledger.hold(need)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        self._used -= buffer.nbytes
        if self._held + buffer.nbytes <= self.limit:
            self._free.append(buffer)
        else:
            self._ledger.hold(-buffer.nbytes)

    def trim(self) -> None:
        while self._free:
            self._ledger.hold(-self._free.pop().nbytes)

    @property
    def _held(self) -> int:
        return self._used + sum(buffer.nbytes for buffer in self._free)
