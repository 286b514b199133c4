"""What the order is told of a reduction: enough for a rank that has no part in it to take part all the same."""

from typing import Self

import msgspec
import torch

from retrograde.transport.messages import DTYPES, Key
from retrograde.transport.order import Reduce
from retrograde.transport.records import Count, Record


class ReductionLabel(Record, frozen=True):
    """Says which of a unit's gradients since the last boundary is meant, how and in which dtypes it travels, and what
    it is for.

    Ranks that want the same reduction have the same key for it, but for the boundary, which all have passed."""

    attempt: Count
    turn: Count
    backward: Count
    dtype: str
    sums: str  # the dtype of replicas' sums, where there are replicas
    apart: bool  # do owners get each rank's part, or their sum?
    uses: bytes

    @classmethod
    def of(cls, key: Key, dtype: torch.dtype, sums: torch.dtype, apart: bool, uses: bytes) -> Self:
        return cls(key.attempt, key.turn, key.backward, str(dtype), str(sums), apart, uses)

    @classmethod
    def read(cls, want: Reduce) -> Self:
        return msgspec.msgpack.decode(want.uses, type=cls)

    def want(self, unit: int) -> Reduce:
        return Reduce(unit, msgspec.msgpack.encode(self))

    def key(self, unit: int, meeting: int) -> Key:
        return Key(unit, meeting, self.attempt, self.turn, self.backward)

    @property
    def travels_as(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sums_travel_as(self) -> torch.dtype:
        return DTYPES[self.sums]
