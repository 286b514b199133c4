"""The checksum of a block of a checkpoint, and the file that makes them as it is written."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest

from retrograde.checkpoint.checksums import BLOCK, checksum
from retrograde.checkpoint.writing import _SummedFile


def noise(seed: int, size: int = BLOCK) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def test_it_is_what_it_was() -> None:
    """Files have it: another one would refuse all that were saved."""
    assert checksum(bytes(BLOCK)) == 14347342589968562846
    assert checksum(bytes(range(256)) * 4096) == 14347342588597082958
    assert checksum(b"retrograde") == 11573800536401374026


def test_damage_within_a_byte() -> None:
    for content in (noise(0), bytearray(BLOCK), bytearray(numpy.ones(BLOCK // 4, numpy.float32).tobytes())):
        before = checksum(content)
        chance = random.Random(1)
        for place in (0, 7, 8, 4095, 4096, BLOCK - 1, *(chance.randrange(BLOCK) for _ in range(40))):
            flipped = chance.randrange(1, 256)
            content[place] ^= flipped
            assert checksum(content) != before, place
            content[place] ^= flipped
        assert checksum(content) == before


@pytest.mark.parametrize("dtype", ("float64", "float32", "float16", "int64", "uint8"))
@pytest.mark.parametrize("value", (1, 2, 64, 255))
@pytest.mark.parametrize("lost", (8, 4096, 8192, 16384, 65536, BLOCK // 2, BLOCK))
def test_pages_that_were_never_written(dtype: str, value: int, lost: int) -> None:
    """Memory of equal numbers: sums of rows or columns alone would cancel out."""
    content = bytearray(numpy.full(BLOCK // numpy.dtype(dtype).itemsize, value, dtype).tobytes())
    before = checksum(content)
    for start in {0, (BLOCK - lost) // 2 // 4096 * 4096}:
        damaged = bytearray(content)
        damaged[start : start + lost] = bytes(lost)
        assert checksum(damaged) != before


def test_parts_that_changed_places() -> None:
    content = noise(2)
    before = checksum(content)
    for size in (1, 8, 512, 4096, 65536):
        swapped = bytearray(content)
        swapped[:size], swapped[-size:] = content[-size:], content[:size]
        assert checksum(swapped) != before
    signs = numpy.frombuffer(bytes(content), numpy.uint64).copy()
    signs[[3, 900]] ^= numpy.uint64(1 << 63)
    assert checksum(signs.tobytes()) != before


@pytest.mark.parametrize("size", (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + BLOCK // 2, 3 * BLOCK + 77))
@pytest.mark.parametrize("synced", (False, True), ids=("at the end", "in between"))
def test_a_file_in_pieces(tmp_path: Path, size: int, synced: bool) -> None:
    """However it is cut, and whether somebody asks for all to be on the disk in between."""
    content = noise(3, size)
    told: list[int] = []
    file = _SummedFile(tmp_path / "file", told.append)
    chance = random.Random(4)
    at = 0
    while at < size:
        count = chance.choice((1, 7, 5000, BLOCK // 2, BLOCK, 2 * BLOCK))
        at += file.write(memoryview(content)[at : at + count])
        assert file.tell() == at
        if synced:
            file.fileno()
            assert (tmp_path / "file").stat().st_size == at
    file.close()
    file.close()
    assert (tmp_path / "file").read_bytes() == content
    assert sum(told) == size
    found = file.sums()
    assert found.size == size
    filled_up = content + bytes(-size % BLOCK)
    assert found.sums == [checksum(filled_up[start : start + BLOCK]) for start in range(0, size, BLOCK)]
