"""Checkpoints of DeepSpeed: weights and the optimizer's state of ZeRO stages 1, 2 and 3, and universal ones.

A rank's file has flat tensors, in which parameters lie like this:

    stage 1, 2    a group's parameters one after the other, cut into equal parts for the ranks; a part says which
                  elements of which parameter it has (`param_slice_mappings`)
    stage 3       of each parameter its rank's share, rounded up, one after the other over all groups
    universal     a folder for each parameter, with the whole of each tensor

Files are read by `torch.load(weights_only=True)`, mapped into memory. Objects of DeepSpeed in them become inert.
"""

import itertools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from retrograde.checkpoint.stored import Checkpoint, Extent
from retrograde.errors import CheckpointError
from retrograde.layout.flat import row_by_row

_LATEST = ("latest", "latest_universal")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = "*mp_rank_00_model_states.pt"
_WEIGHTS = "fp32"


class _Inert:
    """Stands for an object of DeepSpeed in a file. It has the attributes that were saved, and does nothing."""

    args: tuple[Any, ...] = ()

    def __init__(self, *args: Any) -> None:
        self.args = args


_KNOWN = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def _load(path: Path) -> Any:
    stand_ins = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in _KNOWN]
    try:
        with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named.group(1)}, which is not known here" if named else "it is damaged, or not torch's"
        raise CheckpointError(f"{path} was not read, and nothing of it was executed: {why}") from error


class FlatTensor:
    """A `Stored` whose elements, row by row, are in several flat tensors, one after the other."""

    def __init__(self, name: str, shape: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = parts[0].dtype if parts else torch.float32
        self._parts = parts
        self._starts = list(itertools.accumulate((part.numel() for part in parts), initial=0))
        if self._starts[-1] < self.shape.numel():
            raise CheckpointError(
                f"{name} of shape {tuple(shape)} has {self.shape.numel()} elements, and the files of all ranks have "
                f"{self._starts[-1]}: is one of them missing?"
            )

    def check(self, extent: Extent) -> None:
        """Check nothing: these files have no checksums, and are mapped into memory."""

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        if extent.numel == 0:
            return
        strides = row_by_row(self.shape)
        first = sum(offset * stride for offset, stride in zip(extent.offsets, strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(extent.sizes, strides, strict=True))
        into.copy_(torch.cat(list(self._range(first, first + span))).as_strided(extent.sizes, strides))

    def _range(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        for start, part in zip(self._starts, self._parts, strict=False):
            low, high = max(first - start, 0), min(stop - start, part.numel())
            if low < high:
                yield part[low:high]


# ---- which files there are
def is_deepspeed(path: Path) -> bool:
    return _tag(path) is not None


def _tag(path: Path) -> Path | None:
    """The folder with the files: `path`, or the folder that a file in it names as the latest."""
    if (path / "zero").is_dir() or any(_OPTIMIZER_FILE.fullmatch(each.name) for each in path.glob("*.pt")):
        return path
    for name in _LATEST:
        if (path / name).is_file():
            tag = (path / name).read_text(encoding="utf-8").strip()
            if Path(tag).name == tag and (path / tag).is_dir():
                return _tag(path / tag)
    return None


def open_deepspeed(path: Path) -> Checkpoint:
    folder = _tag(path)
    if folder is None:
        raise CheckpointError(f"path={str(path)!r} is not a checkpoint of DeepSpeed")
    return _open_universal(folder) if (folder / "zero").is_dir() else _open_zero(folder)


def _model_files(folder: Path) -> list[dict[str, Any]]:
    """The ranks' files about the model: which parameters there are, buffers, and at stages 1 and 2 weights."""
    found = sorted(folder.glob(_MODEL_FILE), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    if not found:
        raise CheckpointError(f"{folder} has no {_MODEL_FILE.lstrip('*')}, which says how parameters are called")
    return [_load(each) for each in found]


# ---- ZeRO
def _open_zero(folder: Path) -> Checkpoint:
    by_rank = _optimizer_files(folder)
    models = _model_files(folder)
    shapes: list[Mapping[str, torch.Size]] = models[0]["param_shapes"]
    stage = 3 if "fp32_flat_groups" in by_rank[0] else 2
    split = _split_by_share if stage == 3 else _split_by_group
    weights = split(shapes, [_flat_weights(each) for each in by_rank], by_rank)
    bases = [each["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for each in by_rank]
    first = bases[0]["state"]
    state: dict[str, dict[str, Any]] = {name: {} for group in shapes for name in group}
    for key in next(iter(first.values()), {}):
        flats = [[kept[key] for _, kept in sorted(base["state"].items())] for base in bases]
        if flats[0][0].dim() == 0:
            _add_numbers(state, key, shapes, flats[0])
        else:
            for name, tensor in split(shapes, flats, by_rank).items():
                state[name][key] = tensor
    others = _others(models, weights)
    aliases = {name: weights[source] for name, source in _pairs(models[0].get("shared_params")) if source in weights}
    origin = f"DeepSpeed ZeRO stage {'3' if stage == 3 else '1 or 2'}, {len(by_rank)} ranks"
    groups = _groups(bases[0]["param_groups"], shapes)
    kept: dict[str, Any] = {"extra": _extra(models[0]), "notes": _notes(models[0])}
    return Checkpoint(folder, origin, {**others, **weights, **aliases}, state, groups, **kept)


def _optimizer_files(folder: Path) -> list[dict[str, Any]]:
    found = {}
    for path in folder.glob("*.pt"):
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match and int(match.group(2)):
            raise CheckpointError(f"{path}: tensor parallel checkpoints are not read; make a universal one of it")
        if match:
            found[int(match.group(1))] = path
    if sorted(found) != list(range(len(found))):
        lost = next(rank for rank in itertools.count() if rank not in found)
        raise CheckpointError(f"{folder} has no file of rank {lost} (zero_pp_rank_{lost}_..._optim_states.pt)")
    return [_load(found[rank])["optimizer_state_dict"] for rank in sorted(found)]


def _flat_weights(own: Mapping[str, Any]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = own[
        "fp32_flat_groups" if "fp32_flat_groups" in own else "single_partition_of_fp32_groups"
    ]
    return flat


Shapes = Sequence[Mapping[str, torch.Size]]
Flats = Sequence[Sequence[torch.Tensor]]  # by rank, then by group


def _split_by_group(shapes: Shapes, flats: Flats, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, FlatTensor]:
    found = {}
    for group, own in enumerate(shapes):
        if "param_slice_mappings" in by_rank[0]:
            addresses = [each["param_slice_mappings"][group] for each in by_rank]
            for name, shape in own.items():
                parts = [
                    _at(flat[group], each[name]) for flat, each in zip(flats, addresses, strict=True) if name in each
                ]
                found[name] = FlatTensor(name, shape, parts)
        else:
            found |= _in_a_row(own, torch.cat([flat[group] for flat in flats]))
    return found


def _at(flat: torch.Tensor, address: Any) -> torch.Tensor:
    return flat[int(address.start) : int(address.start) + int(address.numel)]


def _in_a_row(shapes: Mapping[str, torch.Size], flat: torch.Tensor) -> dict[str, FlatTensor]:
    """Split a flat tensor of a version of DeepSpeed that does not say where parameters lie: one after the other."""
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = FlatTensor(name, shape, [flat[at : at + shape.numel()]])
        at += shape.numel()
    return found


def _split_by_share(shapes: Shapes, flats: Flats, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, FlatTensor]:
    joined = [torch.cat(list(flat)) if len(flat) > 1 else flat[0] for flat in flats]
    found, at = {}, 0
    for name, shape in (item for group in shapes for item in group.items()):
        share = -(-shape.numel() // len(flats))
        found[name] = FlatTensor(name, shape, [flat[at : at + share] for flat in joined])
        at += share
    return found


def _add_numbers(state: dict[str, dict[str, Any]], key: str, shapes: Shapes, numbers: Sequence[torch.Tensor]) -> None:
    """Give each parameter the counter that DeepSpeed keeps for its group."""
    for group, own in enumerate(shapes):
        for name in own:
            state[name][key] = FlatTensor(name, (), [numbers[min(group, len(numbers) - 1)].reshape(1)])


def _others(models: Sequence[Mapping[str, Any]], trained: Mapping[str, Any]) -> dict[str, FlatTensor]:
    """Buffers and frozen parameters."""
    found = {}
    fragments = models[0].get("frozen_param_fragments") or {}
    shapes = models[0].get("frozen_param_shapes") or {}
    for name, value in (models[0].get("module") or {}).items():
        if name in fragments:
            parts = [each["frozen_param_fragments"][name].reshape(-1) for each in models]
            found[name] = FlatTensor(name, shapes[name], parts)
        elif name not in trained and isinstance(value, torch.Tensor):
            found[name] = FlatTensor(name, value.shape, [value.reshape(-1)])
    return found


def _pairs(shared: Any) -> Iterator[tuple[str, str]]:
    """Pairs of names: a tied parameter, and the one whose weights it has."""
    for pair in shared.items() if isinstance(shared, Mapping) else shared or ():
        yield str(pair[0]), str(pair[1])


def _groups(saved: Sequence[Mapping[str, Any]], shapes: Shapes) -> list[dict[str, Any]]:
    if len(saved) != len(shapes):
        return [{**saved[0], "params": [name for own in shapes for name in own]}]
    return [{**options, "params": list(own)} for options, own in zip(saved, shapes, strict=True)]


_SCHEDULE = "lr_scheduler"
_SHAPES = {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
_TAKEN = {"module", "buffer_names", _SCHEDULE, *_SHAPES}


class _ReadAlready:
    """A `StoredObject` that was read already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def load(self) -> Any:
        return self._value


def _extra(model: Mapping[str, Any]) -> dict[str, _ReadAlready]:
    """The state of the learning rate schedule, under the name that DeepSpeed's interface here gives it."""
    return {"scheduler": _ReadAlready(model[_SCHEDULE])} if model.get(_SCHEDULE) else {}


def _notes(model: Mapping[str, Any]) -> list[str]:
    return [f"{key} of the file of the model" for key, value in model.items() if value and key not in _TAKEN]


# ---- universal
def _open_universal(folder: Path) -> Checkpoint:
    weights: dict[str, FlatTensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for own in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        for file in sorted(own.glob("*.pt")):
            value = _load(file)
            tensor = value["param"] if isinstance(value, Mapping) else torch.as_tensor(value)
            stored = FlatTensor(own.name, tensor.shape, [tensor.reshape(-1)])
            if file.stem == _WEIGHTS:
                weights[own.name] = stored
            else:
                state.setdefault(own.name, {})[file.stem] = stored
    models = _model_files(folder)
    options = _load(folder / "zero" / "optimizer_state.pt")["param_groups"]
    groups = _groups(options, models[0]["param_shapes"])
    others = _others(models, weights)
    kept: dict[str, Any] = {"extra": _extra(models[0]), "notes": _notes(models[0])}
    return Checkpoint(folder, "DeepSpeed, universal", {**others, **weights}, state, groups, **kept)
