"""Flat buffers that are used again: fresh ones cost page faults, and pages and buckets come and go all step."""

from typing import NamedTuple, Protocol

import torch

from retrograde.devices import Event, Stream, Streams
from retrograde.ledger import Ledger
from retrograde.torch_internals import storage_id
from retrograde.transport import Memory


class Allocator(Protocol):
    """Where memory comes from: a transport, which may need to register it."""

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor: ...


class Loan(NamedTuple):
    """A buffer, and the event after which it is free."""

    data: torch.Tensor
    free: Event  # whoever writes waits for it first: the last reader of the memory recorded it


class BufferPool:
    """Lends flat buffers. It keeps free ones only while everything taken and free together fits in `limit` bytes."""

    def __init__(self, memory: Memory, allocator: Allocator, streams: Streams, ledger: Ledger) -> None:
        self.streams = streams
        self.ledger = ledger
        self.limit = 0.0
        self._memory = memory
        self._allocator = allocator
        self._used = 0
        self._free: list[Loan] = []
        self._homes: dict[int, Stream] = {}  # the stream on which each buffer was allocated, by its storage

    def take(self, numel: int, dtype: torch.dtype) -> Loan:
        need = numel * dtype.itemsize
        for index, (buffer, _) in enumerate(self._free):
            if buffer.numel() == numel and buffer.dtype == dtype:
                self._used += need
                return self._free.pop(index)
        self.trim(self.limit - need)  # what is there and what comes fit together
        stream = self.streams.current()
        buffer = self._allocator.allocate(self._memory, numel, dtype, stream)
        assert buffer.storage_offset() == 0, "a buffer is found again by its storage, which it has for itself"
        self._used += need
        self._homes[storage_id(buffer)] = stream
        self.ledger.hold(need)
        return Loan(buffer, stream.record())

    def give(self, buffer: torch.Tensor, free: Event) -> None:
        self._used -= buffer.nbytes
        if self._allocated + buffer.nbytes <= self.limit:
            self._free.append(Loan(buffer, free))
        else:
            self._let_go(Loan(buffer, free))

    def trim(self, limit: float = -1) -> None:
        """Let go of free buffers, the oldest first, until what is left fits in `limit` bytes; of all by default."""
        while self._free and self._allocated > limit:
            self._let_go(self._free.pop(0))

    def _let_go(self, loan: Loan) -> None:
        """Let go of a buffer.
        Its memory is free to the stream that it was allocated on, which waits for whoever used it last (Rule 5)."""
        self._homes.pop(storage_id(loan.data)).wait(loan.free)
        self.ledger.hold(-loan.data.nbytes)

    @property
    def used(self) -> int:
        """Bytes that have been taken and not given back."""
        return self._used

    @property
    def _allocated(self) -> int:
        return self._used + sum(loan.data.nbytes for loan in self._free)
