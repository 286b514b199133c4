"""What users call. torch's checkpoints take long to import, so what needs them is imported when it is used."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from retrograde.arguments import flag, wrong
from retrograde.errors import CheckpointError

if TYPE_CHECKING:
    from retrograde.checkpoint.loading import Loaded
    from retrograde.checkpoint.saving import Saving
    from retrograde.checkpoint.subject import Model, Optimizers


def save(
    path: str | os.PathLike[str],
    model: "Model",
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
    model: "Model",
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


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise wrong("path", path, "is not a path", "the path of a folder", CheckpointError)
    return Path(path)
