"""Writing: torch's own writer of files, into a folder that becomes the checkpoint when everything is there.

torch.distributed.checkpoint plans who writes what, has every rank write its file, and tells the first rank what was
written, which then writes the metadata. Here each file also has checksums, made as it is written. They travel with
torch's results, and the first rank ends with the marker and the rename (folders.py).

    every rank      write_data   __0_0.distcp, __1_0.distcp, ...   fsync
    first rank      finish       .metadata, marker                 fsync, rename
"""

import contextlib
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

from retrograde.checkpoint.folders import commit, keep_last, prepare, saving_folder
from retrograde.checkpoint.marker import FileSums, Marker, RunningSums
from retrograde.checkpoint.snapshot import Serialized
from retrograde.layout.flat import is_dense

_AT_ONCE = 8 << 20  # bytes

Told = Callable[[int], None]  # of bytes that have been written or read


class _SummedFile(io.FileIO):
    """A file whose checksums are made as it is written."""

    def __init__(self, path: Path, told: Told) -> None:
        super().__init__(path, "xb")
        self.running = RunningSums()
        self._told = told
        self._handed = 0  # bytes that the disk was told to begin with

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.running.add(memoryview(data).cast("B")[:written])
        self._told(written)
        self._hand_over()
        return written

    def _hand_over(self) -> None:
        """Have the disk begin, so that syncing at the end takes less time."""
        ready = self.running.size - self._handed
        if ready >= _AT_ONCE:
            os.posix_fadvise(self.fileno(), self._handed, ready, os.POSIX_FADV_DONTNEED)
            self._handed += ready


class _SummedFiles(FileSystem):
    """torch's way to files."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.sums: dict[str, FileSums] = {}
        self._told = told

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        raw = _SummedFile(Path(path), self._told)
        with io.BufferedWriter(raw, buffer_size=1 << 20) as stream:
            yield cast(io.IOBase, _Flushing(stream))
            stream.flush()
        self.sums[Path(path).name] = raw.running.result()


class _Flushing:
    """torch syncs a file by its descriptor: what is still in the buffer must be written by then."""

    def __init__(self, stream: "io.BufferedWriter[_SummedFile]") -> None:
        self._stream = stream
        self.write = stream.write
        self.flush = stream.flush
        self.tell = stream.tell
        self.close = stream.flush  # the file is closed when its checksums are known

    def fileno(self) -> int:
        self._stream.flush()
        return self._stream.fileno()


@dataclasses.dataclass(frozen=True)
class _SummedResult(WriteResult):
    """The first of a rank's results, with the checksums of the rank's files."""

    files: dict[str, FileSums] = dataclasses.field(default_factory=dict)


class CheckpointWriter(FileSystemWriter):
    """For `dcp.save(state, storage_writer=...)`. Nothing is at `path` until everything is."""

    def __init__(self, path: Path, world: int, keep: int | None = None, told: Told = lambda count: None) -> None:
        super().__init__(saving_folder(path), overwrite=False)
        self._target = path
        self._world = world
        self._keep = keep
        self._files = _SummedFiles(told)
        self.fs = self._files

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """torch would make the folder on every rank. Here the first rank does, when all have come."""
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
        # torch has renamed it.
        files |= {name.removesuffix(".tmp"): sums for name, sums in self._files.sums.items() if name not in files}
        Marker(time.time(), self._world, files).write(saving_folder(self._target))
        commit(self._target)
        if self._keep is not None:
            keep_last(self._target, self._keep)


@contextlib.contextmanager
def without_torchs_checksums() -> Iterator[None]:
    """torch makes a checksum of each tensor, for programs that unzip its files. Here each block has one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class SnapshotPlanner(DefaultSavePlanner):
    """Writes what is no tensor as it was serialized (snapshot.py)."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, Serialized):
            return io.BytesIO(object.data)
        if isinstance(object, torch.Tensor) and object.device.type == "cpu":
            return _with_own_storage(object)
        return super().transform_object(write_item, object)


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as if it were all that there is. torch copies a tensor that is part of a larger storage, as
    pieces are, before it writes it: a file would have the whole storage otherwise."""
    elements = tensor.detach()
    dense = elements.numel() > 0 and is_dense(elements.shape, elements.stride())
    if not dense or elements.untyped_storage().nbytes() == elements.nbytes:
        return elements
    raw = elements.as_strided((elements.numel(),), (1,)).view(torch.uint8).numpy()
    alone = torch.from_numpy(raw).view(elements.dtype)
    return alone.as_strided(elements.shape, elements.stride())
