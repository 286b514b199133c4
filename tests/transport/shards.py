"""Stands in for an engine where only a transport is looked at."""

import torch

from retrograde.transport import Rest, Stamp


class Shards:
    """One unit whose shard has so many ones. Implements `ShardServer`."""

    def __init__(self, elements: int = 0) -> None:
        self._elements = elements

    def shard_numel(self, unit: int) -> int:
        return self._elements

    def state(self) -> tuple[int, Rest]:
        return 0, Rest.ASK

    def shard_for(self, unit: int, stamp: Stamp) -> torch.Tensor | str:
        if unit:
            raise IndexError(f"there is no unit {unit}")
        return torch.ones(self._elements)
