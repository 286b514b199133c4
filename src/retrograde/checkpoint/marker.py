"""The marker of a complete checkpoint: which files it has, and their checksums.

A file has a checksum for each block, so that a rank that reads a part of it can check that part. The marker's last line
is the checksum of the marker itself.
"""

import os
import zlib
from pathlib import Path

import msgspec

from retrograde.checkpoint.checksums import BLOCK
from retrograde.errors import CheckpointError

MARKER = "retrograde.json"
_VERSION = 2  # version 1 had a crc32 of each block


class FileSums(msgspec.Struct, frozen=True):
    """Checksums of one file, block by block."""

    size: int
    sums: list[int]  # one for each block, the last of which may be shorter


class Marker(msgspec.Struct, frozen=True):
    """Says that a checkpoint is complete, and which files it has."""

    saved_at: float  # seconds since 1970
    world: int  # how many ranks have saved it
    files: dict[str, FileSums]
    block: int = BLOCK
    version: int = _VERSION

    @staticmethod
    def read(folder: Path) -> "Marker":
        path = folder / MARKER
        text, _, line = path.read_bytes().strip().rpartition(b"\n")
        if line != _line(text):
            raise CheckpointError(f"{path}: not what was saved (checksum); restore it, or load an older checkpoint")
        found = msgspec.json.decode(text, type=Marker)
        if found.version != _VERSION:
            raise CheckpointError(f"{path}: written by another version of retrograde (its format is {found.version})")
        return found

    def write(self, folder: Path) -> None:
        """Write the marker. It gets its name when all of it is on the disk, since others look only for the name."""
        text = msgspec.json.encode(self)
        partial = folder / f"{MARKER}.partial"
        with partial.open("wb") as file:
            file.write(text + b"\n" + _line(text) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / MARKER)


def _line(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
