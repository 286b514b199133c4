"""Checkpoints of torch.distributed.checkpoint: retrograde's, and those of FSDP2 and of plain models.

torch plans the reads (`create_read_items_for_chunk_list`), but its reader is not used, for three reasons: it executes
what the metadata's pickle names; it reads a chunk whole to get a part of it; and it checks nothing.
"""

import functools
import itertools
import pickle
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from retrograde.checkpoint.folders import METADATA, is_complete
from retrograde.checkpoint.marker import Marker
from retrograde.checkpoint.reading import CheckedFile, FileView, check_extent, read_extent
from retrograde.checkpoint.snapshot import deserialized
from retrograde.checkpoint.stored import Checkpoint, Extent, value_of
from retrograde.errors import CheckpointError
from retrograde.torch_internals import Contents, Location, SavedTensor, StoredTensor, find_elements, read_metadata

NAMES_SHOWN = 3
LONGEST_LIST = 1 << 20  # elements of a list that a checkpoint's metadata may ask for


class Files:
    """The files of a checkpoint, opened when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = Marker.read(folder) if is_complete(folder) else None
        self._open: dict[str, CheckedFile] = {}
        self._names: dict[str, list[tuple[Location, str]]] = {}

    def contents(self) -> Contents:
        metadata = self._file(METADATA)
        metadata.check(0, metadata.size)
        try:
            contents = read_metadata(FileView(metadata, 0, metadata.size))
        except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError, EOFError) as error:
            raise CheckpointError(f"{self.folder / METADATA}: {error}; nothing of it was executed") from error
        for (key, _), place in contents.places.items():
            self._names.setdefault(place.file, []).append((place, key))
        return contents

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def at(self, key: str, place: Location) -> CheckedFile:
        """The file in which the object called `key` is; raises for a place that cannot be read."""
        if place.transforms:
            raise CheckpointError(f"{key} was written through {', '.join(place.transforms)}, which is not known here")
        if Path(place.file).name != place.file:
            raise CheckpointError(f"{key} should be in {place.file!r}, which is not in the checkpoint's own folder")
        return self._file(place.file)

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            sums = None if self.marker is None else self.marker.files.get(name)
            if self.marker is not None and sums is None:
                raise CheckpointError(f"{self.folder / name} is not one of the files that were saved")
            self._open[name] = CheckedFile(self.folder / name, sums, functools.partial(self._holders, name))
        return self._open[name]

    def _holders(self, name: str, start: int, stop: int) -> str:
        entries = self._names.get(name, ())
        keys = sorted({key for place, key in entries if place.offset < stop and start < place.offset + place.length})
        more = f" and {len(keys) - NAMES_SHOWN} more" if len(keys) > NAMES_SHOWN else ""
        return (", ".join(keys[:NAMES_SHOWN]) or "nothing that is known") + more


class _PartOfChunk(NamedTuple):
    """A part of an extent that lies in one chunk."""

    place: Location
    inside: Extent  # the part in coordinates of the chunk
    target: Extent  # the part in coordinates of the extent


class DistributedTensor:
    """A `Stored` tensor whose chunks are in several files."""

    def __init__(self, key: str, saved: SavedTensor, files: Files, places: Mapping[torch.Size, Location]) -> None:
        self.shape = saved.shape
        self.dtype = saved.dtype
        self._key = key
        self._saved = saved
        self._files = files
        self._places = places
        self._found: dict[Location, StoredTensor] = {}
        self._planned: dict[Extent, list[_PartOfChunk]] = {}

    def check(self, extent: Extent) -> None:
        covered = 0
        for place, inside, _ in self._parts_of(extent):
            check_extent(self._files.at(self._key, place), place.offset, self._stored(place), inside)
            covered += inside.numel
        if covered != extent.numel:
            raise CheckpointError(f"the checkpoint has {covered} of {extent.numel} elements of {self._key} ({extent})")

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        for place, inside, target in self._parts_of(extent):
            part = into
            for dim, (offset, size) in enumerate(zip(*target, strict=True)):
                part = part.narrow(dim, offset, size)
            read_extent(self._files.at(self._key, place), place.offset, self._stored(place), inside, part)

    def _parts_of(self, extent: Extent) -> list[_PartOfChunk]:
        """The parts of an extent: planned when it is checked, and used again when it is read."""
        if extent not in self._planned:
            self._planned[extent] = list(self._plan(extent))
        return self._planned[extent]

    def _plan(self, extent: Extent) -> Iterator[_PartOfChunk]:
        wanted = ChunkStorageMetadata(torch.Size(extent.offsets), torch.Size(extent.sizes))
        if extent.numel == 0:
            return
        for item in create_read_items_for_chunk_list(self._key, self._metadata, [wanted]):
            place = self._places.get(torch.Size(item.storage_index.offset or ()))
            if place is None:
                raise CheckpointError(f"the checkpoint does not say where it has {item.storage_index}")
            lengths = tuple(item.lengths)
            yield _PartOfChunk(
                place, Extent(tuple(item.storage_offsets), lengths), Extent(tuple(item.dest_offsets), lengths)
            )

    @functools.cached_property
    def _metadata(self) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in self._saved.chunks]
        return TensorStorageMetadata(TensorProperties(self.dtype), self.shape, chunks)

    def _stored(self, place: Location) -> StoredTensor:
        if place not in self._found:
            view = FileView(self._files.at(self._key, place), place.offset, place.length)
            try:
                found = find_elements(view)
            except (pickle.UnpicklingError, BadZipFile, struct.error, ValueError, LookupError, TypeError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{place.file}: {self._key} cannot be read: {error}") from error
            self._check_chunk(place, found)
            self._found[place] = found
        return self._found[place]

    def _check_chunk(self, place: Location, found: StoredTensor) -> None:
        expected = next(sizes for offsets, sizes in self._saved.chunks if self._places.get(offsets) == place)
        if torch.Size(found.shape) != expected or found.dtype != self.dtype:
            raise CheckpointError(
                f"{place.file}: {self._key} has {found.dtype} of shape {found.shape} there, and the metadata say "
                f"{self.dtype} of shape {tuple(expected)}"
            )


class DistributedObject:
    """A `StoredObject` of which the checkpoint has the pickled bytes."""

    def __init__(self, key: str, files: Files, place: Location) -> None:
        self._key = key
        self._files = files
        self._place = place

    def load(self) -> Any:
        file = self._files.at(self._key, self._place)
        file.check(self._place.offset, self._place.length)
        try:
            return deserialized(bytes(file.read(self._place.offset, self._place.length)))
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(
                f"{self._place.file}: {self._key} is not a plain value, and nothing of it was executed"
            ) from error


# ---- the tree that was saved
def open_distributed(folder: Path) -> Checkpoint:
    files = Files(folder)
    try:
        return _opened(files, _sections(_tree(files.contents(), files)))
    except BaseException:
        files.close()
        raise


def _opened(files: Files, tree: dict[str, Any]) -> Checkpoint:
    model = dict(tree.pop("model", {}))
    optimizer = tree.pop("optimizer", None) or tree.pop("optim", None) or {}
    ours: dict[str, Any] = {name: tree.pop(name, {}) for name in ("extra", "extra_by_rank", "model_by_rank", "rng")}
    if not model:  # a state dict was saved as it is
        model, tree = dict(tree), {}
    if "state" not in optimizer and any(key.startswith(("state.", "param_groups.")) for key in optimizer):
        optimizer = _unflattened(optimizer, sorted(model, key=len, reverse=True))
    state = optimizer.get("state", {})
    groups = value_of(optimizer.get("param_groups", []))
    numbered = bool(groups) and any(isinstance(each, int) for group in groups for each in group.get("params", ()))
    origin = "torch.distributed.checkpoint" if files.marker is None else f"retrograde, {files.marker.world} ranks"
    ours |= {"notes": [f"{name}: not known, left" for name in tree], "close": files.close}
    ours["saved_at"] = None if files.marker is None else files.marker.saved_at
    return Checkpoint(files.folder, origin, model, state, groups, numbered, **ours)


def _tree(contents: Contents, files: Files) -> dict[str, Any]:
    by_key: dict[str, dict[torch.Size, Location]] = {}
    for (key, offset), place in contents.places.items():
        by_key.setdefault(key, {})[offset if offset is not None else torch.Size()] = place
    tree: dict[str, Any] = {}
    for key, saved in contents.tensors.items():
        leaf = DistributedTensor(key, saved, files, by_key.get(key, {}))
        _put(tree, contents.paths.get(key, (key,)), leaf)
    for key in contents.objects:
        places = by_key.get(key, {})
        if torch.Size() not in places:
            raise CheckpointError(f"the checkpoint does not say where it has {key}")
        _put(tree, contents.paths.get(key, (key,)), DistributedObject(key, files, places[torch.Size()]))
    return tree


def _put(tree: dict[str, Any], path: tuple[str | int, ...], leaf: Any) -> None:
    """Put a leaf into the tree at a path, in which a text is a key and a number a place in a list."""
    at: Any = tree
    for step, following in itertools.pairwise(path):
        at = _child(at, step, {} if isinstance(following, str) else [])
    _child(at, path[-1], leaf)


def _child(at: Any, step: str | int, new: Any) -> Any:
    """The child at a step of a path; `new` is put there if there is none."""
    if isinstance(at, dict) and isinstance(step, str):
        return at.setdefault(step, new)
    if isinstance(at, list) and isinstance(step, int) and 0 <= step <= LONGEST_LIST:
        at += [None] * (step + 1 - len(at))
        if at[step] is None:
            at[step] = new
        return at[step]
    raise CheckpointError(f"the checkpoint's metadata have a path that leads nowhere, at {step!r}")


def _sections(tree: dict[str, Any]) -> dict[str, Any]:
    """Open a tree in which everything is under one name, as torch's tutorial saves it ("app")."""
    known = ("model", "optimizer", "optim")
    if len(tree) == 1 and not tree.keys() & set(known):
        only = next(iter(tree.values()))
        if isinstance(only, dict) and only.keys() & set(known):
            return dict(only)
    return tree


def _unflattened(section: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Undo torch's `flatten_optimizer_state_dict`, whose keys are such as `state.embed.weight.exp_avg`."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, leaf in section.items():
        kind, _, rest = key.partition(".")
        name = next((name for name in names if rest.startswith(f"{name}.")), None)
        if name is None:
            raise CheckpointError(f"optimizer.{key} is of no parameter of the model in the checkpoint")
        into = state if kind == "state" else groups
        into.setdefault(name, {})[rest.removeprefix(f"{name}.")] = leaf
    return {"state": state, "param_groups": [{**value_of(own), "params": [name]} for name, own in groups.items()]}
