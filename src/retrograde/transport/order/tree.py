"""Who tells whom: rank 0 is the root, and every rank has at most `fan_out` ranks below it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    """The ranks in the order of a heap: those below rank r are r k + 1 to r k + k."""

    world: int
    fan_out: int

    def parent(self, rank: int) -> int:
        return (rank - 1) // self.fan_out

    def children(self, rank: int) -> range:
        first = rank * self.fan_out + 1
        return range(min(first, self.world), min(first + self.fan_out, self.world))

    def size(self, rank: int) -> int:
        """How many ranks are at and below this one."""
        first, last, total = rank, rank, 0
        while first < self.world:
            total += min(last, self.world - 1) - first + 1
            first, last = first * self.fan_out + 1, last * self.fan_out + self.fan_out
        return total

    @property
    def depth(self) -> int:
        """How many messages come one after the other from the farthest rank to the root."""
        rank, depth = self.world - 1, 0
        while rank > 0:
            rank, depth = self.parent(rank), depth + 1
        return depth
