"""DeepSpeed's calls for checkpoints, over `rg.save`: a folder for each tag, and a file that names the latest.

save_dir/latest              the tag that was saved last
save_dir/global_step100/     a checkpoint of rg.save
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

import retrograde as rg
from retrograde.integrations.deepspeed.refusals import wrong

LATEST = "latest"  # DeepSpeed's name for the file
_SAFETENSORS = ".safetensors"

T = TypeVar("T")


@dataclass
class Counters:
    """The numbers that an engine counts."""

    global_steps: int = 0  # updates
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Checkpointed:
    """The parts of an engine that a checkpoint has. Schedulers and scalers have a state_dict()."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: Any
    scaler: Any

    def save(self, folder: str, tag: str, counters: Counters, client_state: Mapping[str, Any], latest: bool) -> None:
        extra: dict[str, Any] = {"counters": asdict(counters), "client_state": dict(client_state)}
        extra |= self._stateful
        rg.save(Path(folder) / tag, self.model, self.optimizer, extra=extra)
        if latest:
            _by_first_rank("save_checkpoint()", partial(_write_latest, Path(folder), tag))

    def load(self, path: Path, counters: Counters, strict: bool, wanted: "Wanted") -> Mapping[str, Any]:
        """Load a checkpoint and return its client state. A checkpoint that DeepSpeed has written has no counters."""
        optimizer = self.optimizer if wanted.optimizer else None
        stateful = self._stateful if wanted.scheduler else {}
        loaded = rg.load(path, self.model, optimizer, extra=stateful, strict=strict)
        for name, count in loaded.extra.get("counters", {}).items():
            setattr(counters, name, count)
        found: Mapping[str, Any] = loaded.extra.get("client_state", {})
        return found

    @property
    def _stateful(self) -> dict[str, Any]:
        named = {"scheduler": self.scheduler, "scaler": self.scaler}
        return {name: each for name, each in named.items() if each is not None}


@dataclass(frozen=True)
class Wanted:
    """What to load from a checkpoint besides the model."""

    optimizer: bool = True
    scheduler: bool = True


def checked_tag(tag: Any, steps: int) -> str:
    """Check a tag. If none is given, return the one that DeepSpeed would use."""
    if tag is None:
        return f"global_step{steps}"
    if not str(tag) or Path(str(tag)).name != str(tag):
        raise wrong("tag", tag, "is not the name of a folder", "a name, such as 'global_step100'")
    return str(tag)


def latest_in(folder: str) -> Path | None:
    """The checkpoint that was saved last, if there is one. The first rank looks, so that all load the same."""
    tag = _by_first_rank("load_checkpoint()", partial(_read_latest, Path(folder)))
    return None if tag is None else Path(folder) / checked_tag(tag, 0)


def _read_latest(folder: Path) -> str | None:
    file = folder / LATEST
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _write_latest(folder: Path, tag: str) -> None:
    partly = folder / f".{LATEST}.partial"
    partly.write_text(tag, encoding="utf-8")
    partly.replace(folder / LATEST)  # so that the file is never incomplete


def write_weights(model: nn.Module, folder: str, name: str, dtype: torch.dtype | None) -> None:
    """Write all weights to one file: safetensors if it ends so, else torch's, for which rank 0 holds all weights."""
    scratch = Path(folder) / f".{name}.export"
    (written,) = rg.export(scratch, model, file_size=2**62, dtype=dtype)
    target = Path(folder) / name
    _by_first_rank(f"save_16bit_model({str(target)!r})", partial(_as_one_file, model, written, target))


def _as_one_file(model: nn.Module, written: Path, target: Path) -> None:
    if target.suffix == _SAFETENSORS:
        os.replace(written, target)
    else:
        torch.save(_with_all_names(load_file(written), model), target)
    shutil.rmtree(written.parent)


def _with_all_names(weights: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Give tied parameters all their names, as a state dict has them. (Files of safetensors have one of them.)"""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for tied in names.values():
        there = next(name for name in tied if name in weights)
        weights |= dict.fromkeys(tied, weights[there])
    return weights


def _by_first_rank(what: str, do: Callable[[], T]) -> T:
    """What the first rank does for all. If it raises, all ranks do, and none waits for it in vain."""
    mine: Exception | None = None
    told: list[Any] = [None, None]  # what came of it, and what went wrong
    if dist.get_rank() == 0:
        try:
            told[0] = do()
        except Exception as error:
            mine = error
            told[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(told, 0)
    if mine is not None:
        raise mine
    if told[1] is not None:
        raise rg.CheckpointError(f"{what} failed on rank 0: {told[1]}")
    found: T = told[0]
    return found
