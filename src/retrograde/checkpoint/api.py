"""The functions that users call. Modules that import torch's checkpoints, which takes long, are imported when used."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from retrograde.arguments import flag, wrong
from retrograde.errors import CheckpointError

if TYPE_CHECKING:
    from retrograde.checkpoint.loading import Loaded
    from retrograde.checkpoint.saving import Saving
    from retrograde.checkpoint.subject import Optimizers, Saveable


def save(
    path: str | os.PathLike[str],
    model: "Saveable",
    optimizer: "Optimizers" = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    async_: bool = False,
    progress: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> "Saving":
    """Save a model, its optimizers and random generators to the folder `path`. Collective: every rank calls it.

    `model`: one that is sharded or plain, an engine, or a pipeline. `extra`: values and objects with a state_dict(),
    which may differ between ranks. `keep`: how many checkpoints stay whose paths differ in numbers only. `async_`: go
    on when the state is copied; `wait()` of the result waits for the rest. The folder is there when all of it is.
    """
    from retrograde.checkpoint.saving import SaveOptions, start_saving

    options = SaveOptions(extra, keep, progress, flag("async_", async_, CheckpointError), process_group)
    return start_saving(_path(path), model, optimizer, options)


def load(
    path: str | os.PathLike[str],
    model: "Saveable",
    optimizer: "Optimizers" = None,
    *,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    progress: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> "Loaded":
    """Load a checkpoint into a model and its optimizers. Collective: every rank calls it.

    `path`: a checkpoint of `rg.save` or torch.distributed.checkpoint, one of DeepSpeed, or a folder of several of
    `rg.save`, of which the last is taken. `extra`: objects that get what was saved under their keys. `strict=False`:
    load what both the checkpoint and the model have. Nothing changes unless all was found, and is what was saved.
    """
    from retrograde.checkpoint.loading import LoadOptions, load_checkpoint

    options = LoadOptions(extra, flag("strict", strict, CheckpointError), progress, process_group)
    return load_checkpoint(_path(path), model, optimizer, options)


def export(
    path: str | os.PathLike[str],
    model: "Saveable",
    *,
    file_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[Path]:
    """Write the weights of a model as safetensors files to the folder `path`. Collective: every rank calls it.

    `file_size`: the most bytes of a file; if there are several files there is an index. `dtype`: that of floating point
    numbers in the files, by default the model's. Returns the files.
    """
    from retrograde.checkpoint.exporting import export_model

    return export_model(_path(path), model, file_size, _dtype(dtype), process_group)


def load_pretrained(
    model: "Saveable",
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    progress: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> "Loaded":
    """Load weights from safetensors files, each rank its own parts. Collective: every rank calls it.

    `path`: a file, or a folder with one file or an index, as `rg.export` and others' `save_pretrained` write them."""
    from retrograde.checkpoint.formats.weights import open_weights
    from retrograde.checkpoint.loading import LoadOptions, load_checkpoint

    options = LoadOptions(None, flag("strict", strict, CheckpointError), progress, process_group)
    return load_checkpoint(_path(path), model, None, options, open_weights)


def _dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise wrong(
        "dtype", dtype, "is not a floating point dtype", "one, such as torch.bfloat16, or None", CheckpointError
    )


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise wrong("path", path, "is not a path", "the path of a folder", CheckpointError)
    return Path(path)
