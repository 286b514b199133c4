"""Who is where: replicas are rows, shards are columns."""

from __future__ import annotations

import pytest

from retrograde.layout import Grid

SQUARE = ((0, 1), (2, 3))
CROSSED = ((0, 2, 4), (1, 3, 5))


def test_a_line_is_one_replica() -> None:
    grid = Grid.line(2, 4)
    assert (grid.world, grid.replicas, grid.shards) == (4, 1, 4)
    assert (grid.replica, grid.shard) == (0, 2)
    assert grid.owners == (0, 1, 2, 3)
    assert [(owner.shard, owner.rank) for owner in grid.other_owners] == [(3, 3), (0, 0), (1, 1)]
    assert grid.holders == (2,)
    assert grid.other_holders == ()


@pytest.mark.parametrize(
    ("rank", "replica", "shard", "owners", "holders"),
    [(0, 0, 0, (0, 1), (0, 2)), (1, 0, 1, (0, 1), (1, 3)), (2, 1, 0, (2, 3), (0, 2)), (3, 1, 1, (2, 3), (1, 3))],
)
def test_a_square(rank: int, replica: int, shard: int, owners: tuple[int, ...], holders: tuple[int, ...]) -> None:
    grid = Grid(rank, SQUARE)
    assert (grid.replica, grid.shard, grid.owners, grid.holders) == (replica, shard, owners, holders)


def test_ranks_of_a_replica_need_not_be_neighbours() -> None:
    grid = Grid.of(3, [list(row) for row in CROSSED])
    assert grid == Grid(3, CROSSED)
    assert (grid.replica, grid.shard, grid.owners, grid.holders) == (1, 1, (1, 3, 5), (2, 3))
    assert [(owner.shard, owner.rank) for owner in grid.other_owners] == [(2, 5), (0, 1)]
    assert grid.other_holders == (2,)


@pytest.mark.parametrize("rows", [SQUARE, CROSSED, ((0,), (1,), (2,)), ((0, 1, 2),)])
def test_the_others_are_all_others_once(rows: tuple[tuple[int, ...], ...]) -> None:
    for rank in range(sum(map(len, rows))):
        grid = Grid(rank, rows)
        assert sorted([rank, *(owner.rank for owner in grid.other_owners)]) == sorted(grid.owners)
        assert sorted([rank, *grid.other_holders]) == sorted(grid.holders)
        assert all(grid.owners[owner.shard] == owner.rank for owner in grid.other_owners)
        assert grid.first_holder(rank) == grid.holders[0]


def test_which_replicas_have_some_of_these_ranks() -> None:
    grid = Grid(0, SQUARE)
    assert grid.replicas_of([]) == []
    assert grid.replicas_of([3, 2]) == [1]
    assert grid.replicas_of({1: "a", 3: "b"}) == [0, 1]
