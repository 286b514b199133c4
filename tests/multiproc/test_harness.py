"""The pool of ranks itself: what it returns, what it raises, and that it always comes back."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import CALLS_PER_GROUP, RankError, RankPool, RankTimeout


def _sum_of_ranks(rank: int, world: int, offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, value


def _process_id(rank: int, world: int) -> int:
    return os.getpid()


def _raise_on_last(rank: int, world: int) -> None:
    if rank == world - 1:
        raise ValueError(f"rank {rank} had enough")
    dist.barrier()


def _raise_everywhere(rank: int, world: int) -> None:
    raise KeyError(f"key of rank {rank}")


def _return_error(rank: int, world: int) -> Exception:
    return ValueError(f"seen on rank {rank}")


def _wait_alone(rank: int, world: int) -> None:
    if rank == 0:
        dist.barrier()


def _exit(rank: int, world: int) -> None:
    os._exit(3)


def _die_with_an_heir(rank: int, world: int) -> None:
    """Rank 1 ends, and a child of its keeps its pipe open for a while."""
    if rank == 0:
        raise ValueError("rank 0 had enough")
    if os.fork() == 0:
        time.sleep(4)
    os._exit(3)


@pytest.fixture
def pool():
    others = set(multiprocessing.active_children())
    pool = RankPool(2)
    yield pool
    pool.close()
    assert set(multiprocessing.active_children()) == others


def test_results_come_in_rank_order(ranks) -> None:
    results = ranks(2).run(_sum_of_ranks, 10)
    assert [rank for rank, _ in results] == [0, 1]
    assert [value.item() for _, value in results] == [21, 21]


def test_processes_are_reused_and_the_group_is_renewed(ranks) -> None:
    before = ranks(2).run(_process_id)
    for offset in range(CALLS_PER_GROUP + 2):
        assert ranks(2).run(_sum_of_ranks, offset)[0][1].item() == 1 + 2 * offset
    assert ranks(2).run(_process_id) == before


def test_failures_name_every_rank(ranks) -> None:
    with pytest.raises(RankError, match=r"key of rank 0(.|\n)*key of rank 1") as caught:
        ranks(2).run(_raise_everywhere)
    assert sorted(caught.value.failures) == [0, 1]
    assert ranks(2).run(_sum_of_ranks, 0)[0][1].item() == 1


def test_returned_exceptions_do_not_end_the_pool(ranks) -> None:
    before = ranks(2).run(_process_id)
    assert [str(error) for error in ranks(2).run(_return_error)] == ["seen on rank 0", "seen on rank 1"]
    assert ranks(2).run(_process_id) == before


def test_lives_through_everything(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool, so that few processes are started: a lone error, a hang, a death, a clean end."""
    monkeypatch.setattr("tests.harness.GRACE", 1.0)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 had enough") as caught:
        pool.run(_raise_on_last, timeout=50)
    assert 1 in caught.value.failures
    assert time.monotonic() - start < 45, "an error on one rank must not wait for the time limit"

    with pytest.raises(RankTimeout, match=r"ranks \[0\] of 2(.|\n)*_wait_alone"):
        pool.run(_wait_alone, timeout=4)
    with pytest.raises(RankError, match="exit code 3"):
        pool.run(_exit)
    assert pool.run(_sum_of_ranks, 0)[1][1].item() == 1

    with pytest.raises(RankError, match=r"rank 0 had enough(.|\n)*exit code 3"):
        pool.run(_die_with_an_heir)
