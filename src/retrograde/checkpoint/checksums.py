"""Checksums of blocks of a file, at the speed of memory: zlib's crc32 of all bytes took most of the time of a load.

A block is a table of 8-byte words, 512 in a row. It is folded in both directions, and each fold has a crc32:

    columns     exclusive or over the rows: damage within a byte changes one word, by less than 32 bits, so its
                crc32 always differs
    rows        sum of each row's words, each times an odd number of its column (modulo 2^64): what cancels out in a
                column, such as equal rows that are lost in pairs, does not cancel out here

The last block is filled up with zeros; the lengths of files are compared apart.
"""

import hashlib
import zlib

import numpy

BLOCK = 1 << 20  # bytes
_WORD = numpy.dtype("<u8")
_COLUMNS = 512
_ROW = _COLUMNS * _WORD.itemsize  # bytes
_FACTORS = numpy.frombuffer(hashlib.shake_128(b"retrograde").digest(_ROW), _WORD) | numpy.uint64(1)


class BlockSum:
    """The checksum of a block, to which one part after the other is added. All parts but the last are whole rows."""

    def __init__(self) -> None:
        self._columns = numpy.zeros(_COLUMNS, _WORD)
        self._rows = 0  # the crc32 of the rows so far
        self._left = BLOCK // _ROW

    def add(self, part: bytes | bytearray | memoryview) -> None:
        rest = len(part) % _ROW
        self._fold(memoryview(part)[: len(part) - rest])
        if rest:
            self._fold(bytes(part[-rest:]) + bytes(_ROW - rest))

    def _fold(self, rows: bytes | memoryview) -> None:
        words = numpy.frombuffer(rows, _WORD).reshape(-1, _COLUMNS)
        self._columns ^= numpy.bitwise_xor.reduce(words, axis=0, out=numpy.empty_like(self._columns))
        # einsum, since `@` would copy words that do not lie at multiples of eight bytes.
        self._rows = zlib.crc32(numpy.einsum("rc,c->r", words, _FACTORS).tobytes(), self._rows)
        self._left -= len(words)

    def value(self) -> int:
        rows = zlib.crc32(bytes(self._left * _WORD.itemsize), self._rows)
        return zlib.crc32(self._columns.tobytes()) << 32 | rows


def checksum(block: bytes | bytearray | memoryview) -> int:
    """The checksum of a whole block, or of a file's last one, which may be shorter."""
    made = BlockSum()
    made.add(block)
    return made.value()
