"""Flat buffers that are used again: fresh ones cost page faults, and pages and buckets come and go all step."""

from typing import NamedTuple

import torch

from retrograde.devices import Event, Streams
from retrograde.ledger import Ledger


class Loan(NamedTuple):
    data: torch.Tensor
    free: Event  # whoever writes waits for it first: the last reader of the memory recorded it


class BufferPool:
    """Free buffers stay only while everything taken and free together fits in `limit` bytes."""

    def __init__(self, ledger: Ledger, streams: Streams) -> None:
        self.ledger, self.streams = ledger, streams
        self.limit, self._used = 0.0, 0
        self._free: list[Loan] = []

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        need = numel * dtype.itemsize
        self._used += need
        for index, (buffer, _) in enumerate(self._free):
            if buffer.numel() == numel and buffer.dtype == dtype:
                return self._free.pop(index)
        self.trim(self.limit)
        self.ledger.hold(need)
        return Loan(self.streams.current().empty(numel, dtype), self.streams.current().record())

    def give(self, buffer: torch.Tensor, free: Event) -> None:
        self._used -= buffer.nbytes
        if self._held + buffer.nbytes <= self.limit:
            self._free.append(Loan(buffer, free))
        else:
            self.ledger.hold(-buffer.nbytes)

    def trim(self, limit: float = -1) -> None:
        """Let go of free buffers, the oldest first, until what is held fits in `limit` bytes; of all by default."""
        while self._free and self._held > limit:
            self.ledger.hold(-self._free.pop(0).data.nbytes)

    @property
    def _held(self) -> int:
        return self._used + sum(loan.data.nbytes for loan in self._free)
