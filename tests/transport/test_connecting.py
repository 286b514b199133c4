"""Starting: ranks that never come, ranks that end on the way, strangers that keep silent. Always in bounded time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

import retrograde as rg
from retrograde.transport import connecting, wires
from retrograde.transport.messages import decode_contact, encode
from retrograde.transport.wires import Wires
from tests.harness import RankError, RankPool
from tests.small import batch, build, loss_of

Ranks = Callable[[int], RankPool]
SOON = 20.0  # seconds: far below the process group's time-out, and far above what is needed


def _alone(rank: int, world: int) -> tuple[str, float, bool]:
    """Only rank 0 calls `shard()`; then all do."""
    group = dist.new_group()
    model, said, start = build(), "", time.monotonic()
    if rank == 0:
        with pytest.raises(rg.DivergenceError) as caught:
            rg.shard(model, process_group=group, timeout=1.0)
        said = str(caught.value)
    seconds = time.monotonic() - start
    dist.barrier()
    rg.shard(model, process_group=group, timeout=SOON)
    loss_of(model, batch(rank)).backward()
    trained = any(p.grad is not None for p in model.parameters())
    dist.barrier()
    return said, seconds, trained


@pytest.mark.parametrize(("world", "missing"), ((2, "1"), (4, "1, 2, 3")))
def test_only_one_rank_calls_shard(ranks: Ranks, world: int, missing: str) -> None:
    told = ranks(world).run(_alone, timeout=60.0)
    assert told[0][0] == (
        f"rank 0 waited 1 s for rank(s) {missing} to connect, which did not come: each has not called shard() or "
        f"Pipeline() on this process group, or has ended (its own output says why). Let every rank of the group call "
        f"it, or raise shard(timeout=...)"
    )
    assert told[0][1] < SOON
    assert all(trained for _, _, trained in told)


def _ends_on_the_way(rank: int, world: int) -> None:
    """Rank 0 has told where it can be called, and ends."""
    group = dist.new_group()
    if rank == 0:
        store = _get_process_group_store(group)
        store.set("retrograde/host/0", connecting.host())
        store.set("retrograde/0", encode(Wires(0, None).contact))  # type: ignore[arg-type]
        os._exit(7)
    try:
        rg.shard(build(), process_group=group, timeout=SOON)
    except Exception as error:
        raise AssertionError(f"seen: {type(error).__name__}: {error}") from None


def test_a_rank_that_ends_in_shard_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3).run(_ends_on_the_way, timeout=60.0)
    assert "exit code 7" in caught.value.failures[0]
    told = [caught.value.failures[rank] for rank in (1, 2)]
    for text in told:
        assert "seen: DivergenceError: rank" in text and "the connection to rank 0 was lost, so its process" in text, (
            text
        )


def _silent_strangers(rank: int, world: int) -> tuple[float, int]:
    """Some connect to rank 0 and keep silent, some say half of what is expected, some another thing."""
    group = dist.new_group()
    strangers: list[socket.socket] = []
    usual, wires.HANDSHAKE = wires.HANDSHAKE, 1000  # milliseconds, for this group
    if rank == 1:
        store = _get_process_group_store(group)
        store.set("retrograde/host/1", connecting.host())
        contact = decode_contact(store.get("retrograde/0"))
        for address in (contact.control, contact.bulk):
            for said in (b"", b"\xff\0\0", b"x" * 100):
                strangers.append(socket.socket(socket.AF_UNIX))
                strangers[-1].connect("\0" + address.name[1:])  # type: ignore[union-attr]
                strangers[-1].sendall(said)
    start = time.monotonic()
    model = build()
    rg.shard(model, process_group=group, timeout=SOON)
    loss_of(model, batch(rank)).backward()
    seconds = time.monotonic() - start
    closed = sum(_hung_up_on(stranger) for stranger in strangers)
    dist.barrier()
    wires.HANDSHAKE = usual
    return seconds, closed


def _hung_up_on(stranger: socket.socket) -> bool:
    with stranger:
        stranger.settimeout(2 * SOON)
        try:
            while stranger.recv(1024):
                pass  # a greeting
        except ConnectionResetError:
            pass  # with what it had sent unread
        return True


def test_silent_strangers_are_not_waited_for(ranks: Ranks) -> None:
    (first, _), (second, closed) = ranks(2).run(_silent_strangers, timeout=60.0)
    assert max(first, second) < SOON / 2 and closed == 6


def _left_in_the_store(rank: int, world: int) -> list[bytes]:
    group = dist.new_group()
    model = build()
    rg.shard(model, process_group=group)
    dist.barrier()
    store = _get_process_group_store(group)
    return [store.get(f"retrograde/{what}") for what in (str(rank), f"host/{rank}")]


def test_no_secret_stays_in_the_store(ranks: Ranks) -> None:
    """And a group of the same name that is made later finds no old address."""
    assert ranks(2).run(_left_in_the_store) == [[b"", b""]] * 2


class Broken:
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


def test_a_store_that_is_gone_is_named() -> None:
    with pytest.raises(rg.DivergenceError) as caught:
        connecting.connect(Broken(), 1, 2, 5.0)  # type: ignore[arg-type]
    assert str(caught.value).startswith("rank 1: the process group's store does not answer")


def test_many_ranks_at_once() -> None:
    """Each knows all others, and nothing of it is left."""
    world, store = 24, dist.HashStore()
    found: dict[int, set[int]] = {}

    def join(rank: int) -> None:
        joined = connecting.connect(store, rank, world, 60.0)
        found[rank] = set(joined._contacts)
        joined.close()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert found == {rank: {*range(world)} - {rank} for rank in range(world)}
    assert {store.get(f"retrograde/{rank}") for rank in range(world)} == {b""}
