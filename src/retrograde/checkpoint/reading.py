"""Reads parts of files, checked block by block, at most a buffer at a time."""

import functools
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from retrograde.checkpoint.checksums import BLOCK, checksum
from retrograde.checkpoint.marker import FileSums
from retrograde.checkpoint.stored import Extent
from retrograde.errors import CheckpointError
from retrograde.torch_internals import StoredTensor

BUFFER = 8 << 20  # bytes that are read at a time
END = 2048  # bytes of the end of a zip

Holders = Callable[[int, int], str]  # for a range of a file, the names of what is saved there


class CheckedFile:
    """A file of a checkpoint. If there are checksums, each block is checked once, before it is first used."""

    def __init__(self, path: Path, sums: FileSums | None, holders: Holders) -> None:
        self._path = path
        self._sums = sums
        self._holders = holders
        self._checked: set[int] = set()
        self._scratch = bytearray(BLOCK if sums is not None else 0)  # fresh memory would cost page faults
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            what = holders(0, 1 << 62)
            raise CheckpointError(f"{path} is missing, with {what}; restore it, or load an older checkpoint") from None
        self.size = os.fstat(self._file.fileno()).st_size
        if sums is not None and sums.size != self.size:
            self._file.close()
            lost = holders(min(self.size, sums.size), max(self.size, sums.size))
            raise CheckpointError(
                f"{path} has {self.size} bytes, and {sums.size} were saved; not all is there of {lost}; restore it, "
                f"or load an older checkpoint"
            )

    def close(self) -> None:
        self._file.close()

    def check(self, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > self.size:
            raise CheckpointError(
                f"{self._path} has {self.size} bytes, and {self._holders(start, start + size)} should be at "
                f"{start} to {start + size}; restore it, or load an older checkpoint"
            )
        if self._sums is None or size == 0:
            return
        for block in range(start // BLOCK, (start + size - 1) // BLOCK + 1):
            if block not in self._checked:
                self._check_block(block, self._sums.sums[block])
                self._checked.add(block)

    def _check_block(self, block: int, expected: int) -> None:
        begin = block * BLOCK
        memory = memoryview(self._scratch)[: self.size - begin]
        self.read_into(begin, memory)
        if checksum(memory) != expected:
            raise CheckpointError(
                f"{self._path}: bytes {begin} to {begin + BLOCK} are not what was saved (checksum), with "
                f"{self._holders(begin, begin + BLOCK)}; restore it, or load an older checkpoint"
            )

    def read(self, start: int, size: int) -> bytearray:
        data = bytearray(size)
        self.read_into(start, memoryview(data))
        return data

    def read_into(self, start: int, memory: memoryview) -> None:
        while memory:
            count = os.preadv(self._file.fileno(), [memory], start)
            if count == 0:
                raise CheckpointError(f"{self._path} ends before byte {start}: it has changed while it was read")
            start += count
            memory = memory[count:]


class FileView(io.RawIOBase):
    """A part of a file as a file of its own, whose bytes are checked before they are given out."""

    def __init__(self, file: CheckedFile, start: int, size: int) -> None:
        super().__init__()
        file.check(start, 0)
        self._file = file
        self._start = start
        self._size = min(size, file.size - start)
        self._at = 0
        self._end_begins = max(self._size - END, 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")
        count = max(min(len(memory), self._size - self._at), 0)
        if self._at >= self._end_begins:
            begin = self._at - self._end_begins
            memory[:count] = self._end[begin : begin + count]
        else:
            self._file.check(self._start + self._at, count)
            self._file.read_into(self._start + self._at, memory[:count])
        self._at += count
        return count

    @functools.cached_property
    def _end(self) -> memoryview:
        """The end of the file, read at once: a zip has its table there, which readers read a few bytes at a time."""
        self._file.check(self._start + self._end_begins, self._size - self._end_begins)
        return memoryview(self._file.read(self._start + self._end_begins, self._size - self._end_begins))


# ---- elements of a tensor in a file
class _Slab(NamedTuple):
    """Some rows of an extent, along the dimension with the longest steps in the file."""

    dim: int
    first: int
    rows: int
    start: int  # the first byte, in the file
    length: int  # in bytes, from the first element to the last


def check_extent(file: CheckedFile, base: int, stored: StoredTensor, extent: Extent) -> None:
    """Check the bytes of an extent. `base`: where in this file the file begins in which torch has saved the tensor."""
    for slab in _slabs(base, stored, extent):
        file.check(slab.start, slab.length)


def read_extent(file: CheckedFile, base: int, stored: StoredTensor, extent: Extent, into: torch.Tensor) -> None:
    for slab in _slabs(base, stored, extent):
        part = into.narrow(slab.dim, slab.first, slab.rows) if extent.sizes else into
        if _lies_alike(part, stored, slab):
            file.read_into(slab.start, _memory(part))
            increment_version(part)
            continue
        data = torch.frombuffer(file.read(slab.start, slab.length), dtype=stored.dtype)
        part.copy_(data.as_strided(part.shape, stored.strides))


def _slabs(base: int, stored: StoredTensor, extent: Extent) -> Iterator[_Slab]:
    if extent.numel == 0:
        return
    size = stored.dtype.itemsize
    start = base + stored.start + size * _dot(extent.offsets, stored.strides)
    span = 1 + _dot([length - 1 for length in extent.sizes], stored.strides)
    dims = [dim for dim, length in enumerate(extent.sizes) if length > 1]
    if span * size <= BUFFER or not dims:
        yield _Slab(0, 0, extent.sizes[0] if extent.sizes else 1, start, span * size)
        return
    dim = max(dims, key=lambda each: stored.strides[each])
    step, length = stored.strides[dim], extent.sizes[dim]
    row = span - (length - 1) * step
    rows = max((BUFFER // size - row) // step + 1, 1)
    for first in range(0, length, rows):
        count = min(rows, length - first)
        yield _Slab(dim, first, count, start + size * first * step, size * ((count - 1) * step + row))


def _dot(one: Any, other: Any) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _lies_alike(part: torch.Tensor, stored: StoredTensor, slab: _Slab) -> bool:
    """Does the memory have the same bytes as the file, in the same order and without gaps?"""
    if part.device.type != "cpu" or part.dtype != stored.dtype or part.numel() * part.itemsize != slab.length:
        return False
    strides = zip(part.shape, part.stride(), stored.strides, strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


def _memory(part: torch.Tensor) -> memoryview:
    flat = part.detach().as_strided((part.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)
