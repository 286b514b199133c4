"""Checkpoints of torch: its protocol for tensors in chunks, its metadata, and where elements of tensors lie in files.

Nothing that a file names is called. A pickle names functions and classes; `Reading` knows a few of these names, with
harmless functions in their place, and refuses all others.
"""

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from retrograde.torch_internals.probes import When, expect, find, probe, tiny

if TYPE_CHECKING:  # it takes half as long to import as torch itself
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Names = Mapping[tuple[str, str], object]
BinaryFile = io.RawIOBase | io.BytesIO

_LONGEST_PICKLE = 1 << 20  # bytes of the description of one tensor
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a file in a zip: a mark, the lengths of its name and of what follows


class RefusedPickle(pickle.UnpicklingError):
    """A pickle names something that `Reading` does not know."""


class Reading(pickle.Unpickler):
    """Reads a pickle in which only these names and torch's dtypes may occur."""

    def __init__(self, file: BinaryFile, names: Names) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise RefusedPickle(f"it names {module}.{name}, which is not part of a checkpoint")

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage as it is: ("storage", its type, its file, its device, its size)."""
        return pid


# ---- what torch.distributed.checkpoint asks of tensors of other classes
class SavedInChunks:
    """A tensor of which this rank writes and reads some chunks. Its methods also have the names that torch calls."""

    def write_items(self, name: str) -> "list[WriteItem]":
        """The items of this tensor, called `name` in the checkpoint, that this rank writes."""
        raise NotImplementedError

    def chunks_to_read(self) -> "list[ChunkStorageMetadata]":
        """The chunks of this tensor that this rank reads. torch writes each to `chunk_memory`."""
        raise NotImplementedError

    def chunk_memory(self, index: "MetadataIndex") -> torch.Tensor:
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, object: Any) -> "list[WriteItem]":
        return self.write_items(fqn)

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        return self.chunks_to_read()

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        return self.chunk_memory(index)


# ---- the metadata of torch.distributed.checkpoint
class Location(NamedTuple):
    """The bytes of a file of the checkpoint in which a tensor's chunk or an object is."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]  # the transforms that its bytes have gone through


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint, stored in chunks."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[tuple[torch.Size, torch.Size], ...]  # offsets and sizes in each dimension


class Contents(NamedTuple):
    """The contents of a checkpoint, by keys: names with dots between them."""

    tensors: dict[str, SavedTensor]
    objects: list[str]  # keys of objects that are no tensors
    paths: dict[str, tuple[str | int, ...]]  # for each key, the path to it in the dictionary that was saved
    places: dict[tuple[str, torch.Size | None], Location]  # by key and offsets of the chunk


class _Record:
    """Stands for an object of a class of torch, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}


def read_metadata(file: BinaryFile) -> Contents:
    """Read the metadata of a checkpoint. Raises `RefusedPickle`, or what a broken pickle raises.

    The classes are made anew each time, since a pickle can write to the classes that it names."""
    made: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in _CLASSES}
    root = Reading(file, {**made, **_HARMLESS}).load()
    if not isinstance(root, made[_METADATA, "Metadata"]):
        raise RefusedPickle("it is not the metadata of a checkpoint")
    state = root.state
    tensors: dict[str, SavedTensor] = {}
    objects: list[str] = []
    for key, record in state["state_dict_metadata"].items():
        if isinstance(record, made[_METADATA, "TensorStorageMetadata"]):
            tensors[str(key)] = _saved_tensor(record.state)
        else:
            objects.append(str(key))
    paths = {str(key): tuple(path) for key, path in (state["planner_data"] or {}).items()}
    places = {_index(index.state): _place(record.state) for index, record in state["storage_data"].items()}
    return Contents(tensors, objects, paths, places)


def _saved_tensor(state: dict[str, Any]) -> SavedTensor:
    dtype = state["properties"].state[0]
    chunks = tuple((torch.Size(c.state["offsets"]), torch.Size(c.state["sizes"])) for c in state["chunks"])
    return SavedTensor(dtype, torch.Size(state["size"]), chunks)


def _index(state: dict[str, Any]) -> tuple[str, torch.Size | None]:
    offset = state.get("offset")
    return str(state["fqn"]), None if offset is None else torch.Size(offset)


def _place(state: dict[str, Any]) -> Location:
    transforms = tuple(map(str, state.get("transform_descriptors") or ()))
    return Location(str(state["relative_path"]), int(state["offset"]), int(state["length"]), transforms)


# ---- a tensor that torch.save has written
class StoredTensor(NamedTuple):
    """Where the elements of a saved tensor are: in which order, and where in the file the first one begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int  # a byte of the file
    length: int  # the bytes of its storage from there on


class _Rebuilt(NamedTuple):
    """The description of a tensor in its pickle."""

    storage: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype | None


def find_elements(file: BinaryFile) -> StoredTensor:
    """Find the elements of a tensor that was saved by itself. Reads the zip's table and the pickle, and no element."""
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].split("/")[0]
        if sys.byteorder.encode() != _content(file, archive.getinfo(f"{root}/byteorder")):
            raise ValueError("the tensor was saved on a machine with another byte order")
        pickled = _content(file, archive.getinfo(f"{root}/data.pkl"))
        rebuilt = Reading(io.BytesIO(pickled), _tensor_names()).load()
        if not isinstance(rebuilt, _Rebuilt):
            raise ValueError("what was saved there is not one tensor")
        _, kind, key, *_ = rebuilt.storage
        dtype = rebuilt.dtype or kind
        entry = archive.getinfo(f"{root}/data/{key}")
        begin = _begin(file, entry)
        skipped = rebuilt.offset * dtype.itemsize
    stored = StoredTensor(dtype, rebuilt.shape, rebuilt.strides, begin + skipped, entry.file_size - skipped)
    _check_inside(stored)
    return stored


def _begin(file: BinaryFile, entry: zipfile.ZipInfo) -> int:
    """Where in a zip the first byte of one of its files is."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    file.seek(entry.header_offset)
    mark, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size) or b"")
    if mark != b"PK\3\4":
        raise ValueError(f"{entry.filename} is not where it should be")
    return int(entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length)


def _content(file: BinaryFile, entry: zipfile.ZipInfo) -> bytes:
    """Read a file of a zip without checking it: torch may have left out checksums (`set_crc32_options`)."""
    if entry.file_size > _LONGEST_PICKLE:
        raise ValueError(f"{entry.filename} is too long for the description of a tensor")
    file.seek(_begin(file, entry))
    return file.read(entry.file_size) or b""


def _check_inside(stored: StoredTensor) -> None:
    """Raise unless all elements lie in the storage."""
    if len(stored.shape) != len(stored.strides) or min((*stored.shape, *stored.strides, 0)) < 0:
        raise ValueError(f"a tensor of shape {stored.shape} cannot have strides {stored.strides}")
    if 0 in stored.shape:
        return
    last = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
    if (last + 1) * stored.dtype.itemsize > stored.length:
        raise ValueError(f"a tensor of shape {stored.shape} does not fit into {stored.length} bytes")


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_HARMLESS: Names = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}
"""They cannot be written to."""


def _tensor_names() -> Names:
    """The names that a tensor's pickle may have. They are made anew each time, as those of metadata are."""

    def rebuild_v2(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> _Rebuilt:
        return _Rebuilt(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)), None)

    def rebuild_v3(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> _Rebuilt:
        dtype = rest[2]  # after requires_grad and hooks
        return _Rebuilt(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)), dtype)

    return {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild_v2,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_v3,
        ("torch.storage", "UntypedStorage"): torch.uint8,
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        **_HARMLESS,
    }


@probe(
    "the file of a tensor",
    "find_elements",
    "StoredTensor",
    needed_for="reading a part of a tensor from a checkpoint, without executing what the file says",
    otherwise="checkpoints cannot be read",
    when=When.FIRST_USE,
)
def _a_saved_tensor_is_found() -> None:
    """Assumes: `torch.save` writes a zip whose files are not compressed. `data.pkl` in it calls a function that gets
    the tensor's storage, offset, shape and strides."""
    saved = torch.arange(6.0, dtype=torch.float32, device="cpu").view(2, 3).t()
    for dtype in (torch.float32, torch.bfloat16, torch.uint16):
        file = io.BytesIO()
        torch.save(saved.to(dtype), file)
        found = find_elements(file)
        expect((found.dtype, found.shape, found.strides), (dtype, (3, 2), (1, 3)), "what a saved tensor says of itself")
        elements = torch.frombuffer(bytearray(file.getvalue()[found.start :]), dtype=dtype, count=6)
        expect(elements.tolist(), [0, 1, 2, 3, 4, 5], "the elements of a saved tensor")


@probe(
    "the metadata of checkpoints",
    "read_metadata",
    "Contents",
    "Location",
    "SavedTensor",
    "RefusedPickle",
    needed_for="reading checkpoints of torch.distributed.checkpoint without executing what the file says",
    otherwise="checkpoints cannot be read",
    when=When.DOCTOR,  # it imports a large part of torch
)
def _metadata_has_known_names() -> None:
    """Assumes: a pickle of `Metadata` names the classes of `torch.distributed.checkpoint.metadata`, `_StorageInfo`,
    sizes, dtypes, layouts and paths, and nothing else; and their fields are called as they are."""
    from torch.distributed.checkpoint import metadata as classes

    size = torch.Size([2])
    place = find("torch.distributed.checkpoint.filesystem:_StorageInfo")("file", 3, 4)
    properties = classes.TensorProperties.create_from_tensor(tiny())
    chunk = classes.ChunkStorageMetadata(torch.Size([0]), size)
    saved: Any = {
        "a.w": classes.TensorStorageMetadata(properties, size, [chunk]),
        "a.o": classes.BytesStorageMetadata(),
    }
    written = classes.Metadata(
        saved,
        {"a.w": ("a", "w"), "a.o": ("a", "o")},
        {classes.MetadataIndex("a.w", [0]): place, classes.MetadataIndex("a.o"): place},
        classes.StorageMeta(PosixPath("/")),
    )
    found = Contents(
        {"a.w": SavedTensor(torch.float32, size, ((torch.Size([0]), size),))},
        ["a.o"],
        {"a.w": ("a", "w"), "a.o": ("a", "o")},
        {("a.w", torch.Size([0])): Location("file", 3, 4, ()), ("a.o", None): Location("file", 3, 4, ())},
    )
    expect(read_metadata(io.BytesIO(pickle.dumps(written))), found, "metadata that was written and read")


class _Half(SavedInChunks):
    """A tensor of four elements of which this rank has the last two, for the probe."""

    def __init__(self) -> None:
        self.memory: torch.Tensor = tiny()

    def write_items(self, name: str) -> "list[WriteItem]":
        from torch.distributed.checkpoint import metadata, planner

        properties = metadata.TensorProperties.create_from_tensor(self.memory)
        data = planner.TensorWriteData(self.chunks_to_read()[0], properties, torch.Size([4]))
        index = metadata.MetadataIndex(name, torch.Size([2]))
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)]

    def chunks_to_read(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([2]), torch.Size([2]))]

    def chunk_memory(self, index: "MetadataIndex") -> torch.Tensor:
        return self.memory if index.offset == torch.Size([2]) else torch.empty_like(self.memory)


@probe(
    "tensors that are saved in chunks",
    "SavedInChunks",
    needed_for="saving sharded tensors with torch.distributed.checkpoint, and reading into them",
    otherwise="each rank's piece would be saved as if it were all of the tensor",
    when=When.DOCTOR,  # it imports a large part of torch
)
def _chunks_are_asked_for() -> None:
    """Assumes: torch.distributed.checkpoint asks a tensor that has them by `__create_write_items__`,
    `__create_chunk_list__` and `__get_tensor_shard__`, before it looks at what class it is."""
    from torch.distributed.checkpoint import metadata

    half = _Half()
    helpers = "torch.distributed.checkpoint.planner_helpers:"
    (item,) = written = find(helpers + "_create_write_items")("w", half)
    expect(written, half.write_items("w"), "what is written of a tensor in chunks")
    whole = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    saved = metadata.TensorStorageMetadata(item.tensor_data.properties, torch.Size([4]), [whole])
    (wanted,) = find(helpers + "_create_read_items")("w", saved, half)
    read = (tuple(wanted.storage_offsets), tuple(wanted.dest_offsets), tuple(wanted.lengths))
    expect(read, ((2,), (0,), (2,)), "what is read into a tensor in chunks")
    found = find("torch.distributed.checkpoint.utils:find_tensor_shard")(half, wanted.dest_index)
    expect(found is half.memory, True, "that it is read into the memory of the chunk")
