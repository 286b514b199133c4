"""The record of what happened, and the pool whose bytes it counts."""

from __future__ import annotations

import pytest
import torch

from retrograde.devices import streams_of
from retrograde.ledger import HISTORY, Activity, Entry, Ledger
from retrograde.pages import BufferPool
from retrograde.transport import FakeRanks, Memory
from tests.transport.shards import Shards

CPU = torch.device("cpu")
F32 = torch.float32


def test_counts_bytes_and_order() -> None:
    ledger = Ledger()
    ledger.record(Activity.GATHER, "a", 10)
    ledger.record(Activity.GATHER, "b", 20)
    ledger.record(Activity.REDUCE, "a", 5)
    ledger.record(Activity.GATHER, "a", 10)
    ledger.record(Activity.DROP, "a")
    assert list(ledger.entries) == list(ledger.entries)
    assert [(e.kind, e.unit, e.bytes) for e in ledger.entries] == [
        ("gather", "a", 10),
        ("gather", "b", 20),
        ("reduce", "a", 5),
        ("gather", "a", 10),
        ("drop", "a", 0),
    ]
    assert (ledger.count("gather"), ledger.count("gather", "a"), ledger.count(Activity.GATHER, "b")) == (3, 2, 1)
    assert (ledger.bytes("gather"), ledger.bytes("gather", "a"), ledger.bytes("drop")) == (40, 20, 0)
    assert (ledger.count("join"), ledger.count("gather", "c")) == (0, 0)
    with pytest.raises(AttributeError):
        ledger.entries[0].bytes = 3  # type: ignore[misc]


def test_resident_and_peak() -> None:
    ledger = Ledger()
    for change in (100, 50, -120, 30, -60):
        ledger.hold(change)
    assert (ledger.resident, ledger.peak) == (0, 150)
    ledger.hold(70)
    ledger.record(Activity.GATHER, "a", 1)
    ledger.clear()
    assert (ledger.resident, ledger.peak, list(ledger.entries), ledger.count("gather"), ledger.bytes("gather")) == (
        70,
        70,
        [],
        0,
        0,
    )


def test_totals_outlive_history() -> None:
    ledger = Ledger()
    for _ in range(HISTORY + 5):
        ledger.record(Activity.AGREE, "step", 2)
    assert len(ledger.entries) == HISTORY and ledger.entries[0] == Entry(Activity.AGREE, "step", 2)
    assert ledger.count("agree") == HISTORY + 5 and ledger.bytes("agree", "step") == 2 * (HISTORY + 5)


# ---- buffers
def _pool(limit: float) -> tuple[BufferPool, Ledger]:
    ledger = Ledger()
    transport = FakeRanks(world=2).transport(Shards(), streams_of(CPU), timeout=1.0)
    pool = BufferPool(Memory.PAGE, transport, streams_of(CPU), ledger)
    pool.limit = limit
    return pool, ledger


def _take(pool: BufferPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return pool.take(numel, dtype).data


def _give(pool: BufferPool, buffer: torch.Tensor) -> None:
    pool.give(buffer, pool.streams.current().record())


def test_a_buffer_is_used_again() -> None:
    pool, ledger = _pool(100)
    first = _take(pool, 10, F32)
    assert first.shape == (10,) and first.dtype is F32 and ledger.resident == 40
    _give(pool, first)
    assert ledger.resident == 40, "a free buffer is memory too"
    assert _take(pool, 10, F32) is first
    assert (ledger.resident, ledger.peak) == (40, 40)


def test_only_the_same_kind_is_used_again() -> None:
    pool, ledger = _pool(1000)
    first = _take(pool, 10, F32)
    _give(pool, first)
    others = [_take(pool, 11, F32), _take(pool, 10, torch.float64), _take(pool, 10, torch.int32)]
    assert all(other is not first for other in others)
    assert ledger.resident == 40 + 44 + 80 + 40


def test_free_buffers_make_room_within_the_limit() -> None:
    pool, ledger = _pool(100)
    first, second = _take(pool, 10, F32), _take(pool, 12, F32)
    _give(pool, first)
    _give(pool, second)
    assert ledger.resident == 88
    _take(pool, 5, F32)  # 88 + 20 > 100: the oldest free buffer goes
    assert ledger.resident == 48 + 20
    assert _take(pool, 12, F32) is second
    _take(pool, 40, F32)  # what is in use may exceed the limit, with nothing kept beside it
    assert ledger.resident == 20 + 48 + 160


def test_what_does_not_fit_is_not_kept() -> None:
    pool, ledger = _pool(50)
    small, large = _take(pool, 5, F32), _take(pool, 20, F32)
    _give(pool, large)
    assert ledger.resident == 20
    _give(pool, small)
    assert ledger.resident == 20
    pool.trim()
    assert (ledger.resident, ledger.peak) == (0, 100)
    nothing, ledger = _pool(0)
    _give(nothing, _take(nothing, 3, F32))
    assert ledger.resident == 0


def test_trim_leaves_what_is_used() -> None:
    pool, ledger = _pool(1000)
    used, free = _take(pool, 10, F32), _take(pool, 20, F32)
    _give(pool, free)
    pool.trim()
    assert ledger.resident == used.nbytes
    assert _take(pool, 20, F32) is not free
