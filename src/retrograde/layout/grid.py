"""Who is where: which ranks hold a model together, and which hold the same shard of it.

Ranks are cells of a grid. A row is a *replica*: its ranks hold the model together, a shard each. A column is a shard:
its ranks hold the same elements, and are its *holders*.

                 shard 0   shard 1
    replica 0    rank 0    rank 1       rank 2 holds shard 0 of replica 1.
    replica 1    rank 2    rank 3       It reads pages from rank 3, and adds gradients up with rank 0.

Without a mesh of two dimensions there is one row with all ranks, and a rank's shard has the rank's own number.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class ShardOwner(NamedTuple):
    """A rank of this replica, and which shard it holds."""

    shard: int
    rank: int


@dataclass(frozen=True)
class Grid:
    """Where one rank stands among replicas and shards. Ranks are numbered as the transport numbers them."""

    rank: int
    rows: tuple[tuple[int, ...], ...]  # the ranks of each replica, by shard

    @staticmethod
    def line(rank: int, world: int) -> "Grid":
        """A grid in which all ranks are one replica."""
        return Grid(rank, (tuple(range(world)),))

    @staticmethod
    def of(rank: int, rows: Sequence[Sequence[int]]) -> "Grid":
        return Grid(rank, tuple(map(tuple, rows)))

    # ---- how many
    @property
    def world(self) -> int:
        return self.replicas * self.shards

    @property
    def replicas(self) -> int:
        return len(self.rows)

    @property
    def shards(self) -> int:
        return len(self.rows[0])

    # ---- where this rank is
    @cached_property
    def replica(self) -> int:
        return next(number for number, row in enumerate(self.rows) if self.rank in row)

    @cached_property
    def shard(self) -> int:
        return self.owners.index(self.rank)

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks of this replica, by shard."""
        return self.rows[self.replica]

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold this rank's shard, by replica."""
        return tuple(row[self.shard] for row in self.rows)

    # ---- the others, nearest first, so that not everybody asks rank 0 at once
    @cached_property
    def other_owners(self) -> tuple[ShardOwner, ...]:
        shards = [(self.shard + step) % self.shards for step in range(1, self.shards)]
        return tuple(ShardOwner(shard, self.owners[shard]) for shard in shards)

    @cached_property
    def other_holders(self) -> tuple[int, ...]:
        return tuple(self.holders[(self.replica + step) % self.replicas] for step in range(1, self.replicas))

    # ---- others
    def first_holder(self, rank: int) -> int:
        """The rank of the first replica that holds the same shard as `rank`."""
        row = next(row for row in self.rows if rank in row)
        return self.rows[0][row.index(rank)]

    def replicas_of(self, ranks: Collection[int]) -> list[int]:
        """The replicas that have any of these ranks, in order."""
        return [number for number, row in enumerate(self.rows) if not set(ranks).isdisjoint(row)]
