"""Writing: torch's own writer writes files into a folder that becomes the checkpoint when all of them are there.

torch.distributed.checkpoint plans who writes what, has every rank write its file, and tells the first rank what was
written, which then writes the metadata. Here each file also has checksums, made as it is written. They travel with
torch's results, and the first rank ends with the marker and the rename (folders.py).

    every rank      write_data   __0_0.distcp, __1_0.distcp, ...   fsync
    first rank      finish       .metadata, marker                 fsync, rename
"""

import contextlib
import copy
import dataclasses
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from retrograde.checkpoint.checksums import BLOCK, BlockSum
from retrograde.checkpoint.folders import commit, keep_last, prepare, saving_folder
from retrograde.checkpoint.marker import FileSums, Marker
from retrograde.checkpoint.snapshot import Serialized
from retrograde.layout.flat import is_dense

_AT_ONCE = 8 << 20  # bytes
_CHUNK = 1 << 18  # bytes; a block has a whole number of chunks

Told = Callable[[int], None]  # is told how many more bytes have been written or read


class _SummedFile:
    """A file that is written chunk by chunk, with checksums of its blocks. An incomplete chunk waits in memory."""

    def __init__(self, path: Path, told: Told) -> None:
        self._file = io.FileIO(path, "xb")
        self._told = told
        self._chunk = memoryview(bytearray(_CHUNK))
        self._sum = BlockSum()  # the checksum of the block that is being written
        self._sums: list[int] = []
        self._size = 0  # with the bytes that wait
        self._written = 0
        self._handed = 0  # bytes that the disk was told to write

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            inside = self._size % _CHUNK
            part = left[: _CHUNK - inside]
            self._size += len(part)
            if len(part) == _CHUNK:
                self._end_chunk(part)  # written from where it lies, without a copy
            else:
                self._chunk[inside : inside + len(part)] = part
                if self._size % _CHUNK == 0:
                    self._end_chunk(self._chunk)
            left = left[len(part) :]
        return count

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: torch calls this after every tensor, and `fileno()`, which writes what waits, before it syncs."""

    def fileno(self) -> int:
        self._write_what_waits()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file. torch calls this twice."""
        self._write_what_waits()
        self._file.close()

    def sums(self) -> FileSums:
        """The checksums of all that was written."""
        if self._size % BLOCK == 0:
            return FileSums(self._size, self._sums)
        last = copy.copy(self._sum)
        last.add(self._chunk[: self._size % _CHUNK])
        return FileSums(self._size, [*self._sums, last.value()])

    def _end_chunk(self, chunk: memoryview) -> None:
        self._sum.add(chunk)
        self._write(chunk[self._written % _CHUNK :])
        if self._size % BLOCK == 0:
            self._sums.append(self._sum.value())
            self._sum = BlockSum()
            self._hand_over()

    def _write_what_waits(self) -> None:
        if self._written < self._size:
            self._write(self._chunk[self._written % _CHUNK : self._size % _CHUNK])

    def _write(self, data: memoryview) -> None:
        while data:
            count = self._file.write(data)
            assert count is not None  # files never say "later"
            self._written += count
            self._told(count)
            data = data[count:]

    def _hand_over(self) -> None:
        """Have the disk begin to write, so that syncing at the end takes less time."""
        ready = self._written - self._handed
        if ready >= _AT_ONCE:
            os.posix_fadvise(self._file.fileno(), self._handed, ready, os.POSIX_FADV_DONTNEED)
            self._handed += ready


class _SummedFiles(FileSystem):
    """The file system that torch's writer uses: its files are `_SummedFile`s."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.sums: dict[str, FileSums] = {}
        self._told = told

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = _SummedFile(Path(path), self._told)
        with contextlib.closing(file):
            yield cast(io.IOBase, file)
        self.sums[Path(path).name] = file.sums()


@dataclasses.dataclass(frozen=True)
class _SummedResult(WriteResult):
    """The first of a rank's results, with the checksums of the rank's files."""

    files: dict[str, FileSums] = dataclasses.field(default_factory=dict)


class CheckpointWriter(FileSystemWriter):
    """A storage writer for `dcp.save(state, storage_writer=...)`. `path` exists only when everything is written."""

    def __init__(self, path: Path, world: int, keep: int | None = None, told: Told = lambda count: None) -> None:
        super().__init__(saving_folder(path), overwrite=False)
        self._target = path
        self._world = world
        self._keep = keep
        self._files = _SummedFiles(told)
        self.fs = self._files

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make no folder, as torch's would on every rank. The first rank makes it when all have come."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepare(self._target)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        results = super().write_data(plan, planner).wait()
        if results:
            first = results[0]
            summed = _SummedResult(first.index, first.size_in_bytes, first.storage_data, self._files.sums)
            results = [summed, *results[1:]]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileSums] = {}
        for result in (result for by_rank in results for result in by_rank):
            if isinstance(result, _SummedResult):
                files |= result.files
        super().finish(metadata, results)
        # torch has written its metadata as .metadata.tmp, and renamed it.
        files |= {name.removesuffix(".tmp"): sums for name, sums in self._files.sums.items() if name not in files}
        Marker(time.time(), self._world, files).write(saving_folder(self._target))
        commit(self._target)
        if self._keep is not None:
            keep_last(self._target, self._keep)


@contextlib.contextmanager
def without_torchs_checksums() -> Iterator[None]:
    """Switch off torch's checksums of tensors, which serve programs that unzip its files. Here each block has one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class SnapshotPlanner(DefaultSavePlanner):
    """Writes serialized objects as their bytes (snapshot.py)."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, Serialized):
            return io.BytesIO(object.data)
        if isinstance(object, torch.Tensor) and object.device.type == "cpu":
            return _with_own_storage(object)
        return super().transform_object(write_item, object)


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage that has nothing else. torch copies a tensor that is part of a larger storage, as
    pieces are, before it writes it, since a file would have the whole storage otherwise."""
    elements = tensor.detach()
    dense = elements.numel() > 0 and is_dense(elements.shape, elements.stride())
    if not dense or elements.untyped_storage().nbytes() == elements.nbytes:
        return elements
    raw = elements.as_strided((elements.numel(),), (1,)).view(torch.uint8).numpy()
    alone = torch.from_numpy(raw).view(elements.dtype)
    return alone.as_strided(elements.shape, elements.stride())
