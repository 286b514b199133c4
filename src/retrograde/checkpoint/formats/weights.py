"""Weights in safetensors files, in which models are exchanged: one file, or several with an index.

    model.safetensors                           or
    model-00001-of-00002.safetensors, ...       and
    model.safetensors.index.json                {"metadata": {"total_size": ...}, "weight_map": {name: file}}

The safetensors library reads them. It writes a file only from tensors that are all in memory, so here a file is written
by hand, a tensor at a time: the length of the header in eight bytes, the header in JSON, the elements.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from retrograde.checkpoint.folders import sync_folder
from retrograde.checkpoint.reading import BUFFER
from retrograde.checkpoint.stored import Checkpoint, Extent
from retrograde.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_FILE = re.compile(r"model(?:-\d{5}-of-\d{5})?\.safetensors")
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


# ---- planning
class Weight(NamedTuple):
    """A tensor that is to be written to a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightFile(NamedTuple):
    """A file of weights, and which tensors are in it."""

    name: str
    weights: tuple[Weight, ...]


def plan_files(runs: Sequence[Sequence[Weight]], limit: float) -> list[list[WeightFile]]:
    """Plan files of at most `limit` bytes, in order. Weights of different runs are not in one file.

    A tensor of more than `limit` bytes has a file for itself."""
    cut = [_cut(run, limit) for run in runs]
    total = sum(map(len, cut))
    planned: list[list[WeightFile]] = []
    number = 0
    for files in cut:
        planned.append([])
        for weights in files:
            number += 1
            name = f"model{_SUFFIX}" if total == 1 else f"model-{number:05d}-of-{total:05d}{_SUFFIX}"
            planned[-1].append(WeightFile(name, tuple(weights)))
    return planned


def _cut(weights: Sequence[Weight], limit: float) -> list[list[Weight]]:
    files: list[list[Weight]] = []
    size = 0
    for weight in weights:
        if not files or size + weight.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(weight)
        size += weight.bytes
    return files


# ---- writing
def write_file(folder: Path, file: WeightFile, read: Callable[[Weight], torch.Tensor]) -> None:
    """Write a file, a tensor at a time. It gets its name when all of it is on the disk."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in file.weights:
        if weight.dtype not in _CODES:
            raise CheckpointError(f"{weight.name}: safetensors files have no {weight.dtype}; give dtype=...")
        shape = list(weight.shape)
        entries[weight.name] = {
            "dtype": _CODES[weight.dtype],
            "shape": shape,
            "data_offsets": [at, at + weight.bytes],
        }
        at += weight.bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    partial = folder / f"{file.name}.partial"
    with partial.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for weight in file.weights:
            tensor = read(weight).detach().to("cpu", weight.dtype).contiguous()
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next is read
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(folder / file.name)


def forget_index(folder: Path) -> None:
    """Remove the index of an older export before its files are replaced one by one: nobody finds a mixture."""
    (folder / INDEX).unlink(missing_ok=True)
    sync_folder(folder)


def write_index(folder: Path, files: Sequence[WeightFile]) -> None:
    """Write the index if there are several files. It is written last, so that whoever finds it finds all files.

    What is left of an older export, in other files, is removed then: others look for a single file first."""
    if len(files) > 1:
        names = {weight.name: file.name for file in files for weight in file.weights}
        total = sum(weight.bytes for file in files for weight in file.weights)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
        partial = folder / f"{INDEX}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.rename(folder / INDEX)
    written = {file.name for file in files}
    for path in folder.iterdir():
        if _FILE.fullmatch(path.name) and path.name not in written:
            path.unlink()
    sync_folder(folder)


# ---- reading
class _FileTensor:
    """A `Stored` tensor of a safetensors file. The library maps the file and copies the parts that are read."""

    def __init__(self, name: str, path: Path, part: Any) -> None:
        code = part.get_dtype()
        if code not in _DTYPES:
            raise CheckpointError(f"{path}: {name} has elements of a kind that torch has not ({code})")
        self.shape = torch.Size(part.get_shape())
        self.dtype = _DTYPES[code]
        self._part = part

    def check(self, extent: Extent) -> None:
        """Check nothing: these files have no checksums, and the library has checked their lengths."""

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        slices = [slice(offset, offset + size) for offset, size in zip(*extent, strict=True)]
        if not slices:
            into.copy_(self._part[...])
            return
        row = max(extent.numel // max(extent.sizes[0], 1) * self.dtype.itemsize, 1)
        rows = max(BUFFER // row, 1)
        for first in range(0, extent.sizes[0], rows):
            count = min(rows, extent.sizes[0] - first)
            start = extent.offsets[0] + first
            into.narrow(0, first, count).copy_(self._part[(slice(start, start + count), *slices[1:])])


def open_weights(path: Path) -> Checkpoint:
    """Open a file of weights, or a folder with one file or with an index."""
    folder = path if path.is_dir() else path.parent
    names = _files_of(path)
    stack = contextlib.ExitStack()
    found: dict[str, _FileTensor] = {}
    try:
        for name in sorted(set(names.values())):
            file = stack.enter_context(safe_open(folder / name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                if names.get(key, name) == name:  # a tensor may be in two files
                    found[key] = _FileTensor(key, folder / name, file.get_slice(key))
    except (OSError, SafetensorError) as error:
        stack.close()
        raise CheckpointError(f"{folder / name}: {error}") from error
    lost = sorted(names.keys() - found.keys() - {""})
    if lost:
        stack.close()
        raise CheckpointError(f"{folder / names[lost[0]]} has no {lost[0]}, which the index says it has")
    return Checkpoint(folder, "safetensors", found, close=stack.close)


def _files_of(path: Path) -> Mapping[str, str]:
    """The file of each tensor; for a single file without an index, that file under an empty name."""
    if path.is_file() and path.suffix == _SUFFIX:
        return {"": path.name}
    index = path if path.is_file() else path / INDEX
    if index.is_file():
        names = _index(index)
        outside = [name for name in names.values() if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index} names {outside[0]!r}, which is not in its folder")
        return names
    if (path / f"model{_SUFFIX}").is_file():
        return {"": f"model{_SUFFIX}"}
    raise CheckpointError(f"path={str(path)!r} has no model{_SUFFIX} and no {INDEX}; give a folder with one of them")


def _index(path: Path) -> dict[str, str]:
    """Read an index: the file of each tensor."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: is not an index of safetensors files: {error}; restore it") from error


class _Index(msgspec.Struct):
    """What is read of an index."""

    weight_map: dict[str, str]
