"""DeepSpeed's calls for checkpoints, over `rg.save`: a folder for each tag, and a file that names the latest.

save_dir/latest              the tag that was saved last
save_dir/global_step100/     a checkpoint of rg.save
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

import retrograde as rg
from retrograde.integrations.deepspeed.refusals import wrong

LATEST = "latest"  # DeepSpeed's name for the file
_SAFETENSORS = ".safetensors"


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
        if latest and dist.get_rank() == 0:
            partial = Path(folder) / f".{LATEST}.partial"
            partial.write_text(tag, encoding="utf-8")
            partial.replace(Path(folder) / LATEST)  # so that the file is never incomplete
        dist.barrier()  # other ranks may look for the file next

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
    """The checkpoint that was saved last, if there is one."""
    file = Path(folder) / LATEST
    return Path(folder) / file.read_text(encoding="utf-8").strip() if file.is_file() else None


def write_weights(model: nn.Module, folder: str, name: str, dtype: torch.dtype | None) -> None:
    """Write all weights to one file: safetensors if it ends so, else torch's, for which rank 0 holds all weights."""
    scratch = Path(folder) / f".{name}.export"
    (written,) = rg.export(scratch, model, file_size=2**62, dtype=dtype)
    target = Path(folder) / name
    if dist.get_rank() == 0:
        if target.suffix == _SAFETENSORS:
            os.replace(written, target)
        else:
            torch.save(load_file(written), target)
        shutil.rmtree(scratch)
    dist.barrier()
