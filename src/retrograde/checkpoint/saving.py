"""Saving: makes one dictionary of all that is saved, and has torch.distributed.checkpoint write it.

model.embed.weight                      parameters and buffers, in true shapes
optimizer.state.embed.weight.exp_avg    by names of parameters
optimizer.param_groups.0.lr
extra.step                              values that are the same on all ranks
extra_by_rank.1.loader                  values that differ between ranks
model_by_rank.1.norm.running_mean       buffers that differ between ranks, as each rank has them
rng.1.torch                             random generators, by rank
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_together

from retrograde.arguments import instance, whole_number
from retrograde.checkpoint.differing import Meanings, extra_by_rank, meanings, model_by_rank
from retrograde.checkpoint.folders import check_keep
from retrograde.checkpoint.generators import generator_states
from retrograde.checkpoint.progress import ProgressBar
from retrograde.checkpoint.ranks import Together
from retrograde.checkpoint.snapshot import Serialized, serialized, snapshot, snapshots
from retrograde.checkpoint.subject import Optimizers, Saveable, Subject, subject_of
from retrograde.checkpoint.writing import CheckpointWriter, SnapshotPlanner, without_torchs_checksums
from retrograde.engine.named_state import merged_groups
from retrograde.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """The options that the user gave to save."""

    extra: Mapping[str, Any] | None
    keep: int | None
    progress: bool | None
    in_background: bool
    group: dist.ProcessGroup | None


class Saving:
    """A save that has begun."""

    def __init__(self, path: Path, future: "Future[Any]") -> None:
        self.path = path
        self.waited_for = False  # true if wait() was called, and has told how the save ended
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Path:
        """Wait until the save is complete, or raise what went wrong."""
        self.waited_for = True
        with _as_our_error():
            self._future.result()
        return self.path


class _Background:
    """Saves that run beside the training, one at a time, over a process group of their own."""

    def __init__(self) -> None:
        self.last: Saving | None = None
        self._group: dist.ProcessGroup | None = None
        self._beside: dist.ProcessGroup | None = None  # the training's group, which has the same ranks

    def finish(self) -> None:
        """Wait for the last save if nobody has, and raise what went wrong."""
        last, self.last = self.last, None
        if last is not None and not last.waited_for:
            last.wait()

    def group(self, ranks: Together) -> dist.ProcessGroup | None:
        theirs = ranks.group or dist.group.WORLD
        if self._beside is not theirs and theirs is not None:
            self._group = dist.new_group(dist.get_process_group_ranks(theirs), backend="gloo")
            self._beside = theirs
        return self._group


_background = _Background()


def start_saving(path: Path, model: Saveable, optimizer: Optimizers, options: SaveOptions) -> Saving:
    ranks = Together(options.group)
    with ranks.one_fate("rg.save()"):
        _background.finish()
        _check(path, options)
        subject = subject_of(model, optimizer)
        extra = _extra(options.extra)
        optimizer_state = subject.optimizer_state() if subject.optimizers else None
    subject.finish_edits()
    if subject.is_part:
        optimizer_state = _with_all_groups(optimizer_state, ranks)
    state: dict[str, Any] = {}

    def take() -> Meanings:
        state.update(_state(subject, optimizer_state, ranks.rank, copy=options.in_background))
        return meanings(extra, state["model"], subject.names_of_parameters())

    by_rank = ranks.agree("rg.save()", take)
    state |= extra_by_rank(extra, by_rank, ranks.rank)
    state |= model_by_rank(state["model"], by_rank, ranks.rank)
    if options.in_background and not ranks.alone:
        return _save_in_background(path, state, options, ranks)
    with (
        ProgressBar(f"saving {path.name}", ranks.rank == 0 and options.progress) as progress,
        _as_our_error(),
    ):
        writer = CheckpointWriter(path, ranks.world, options.keep, progress.told)
        with _alone_without_warning(ranks), without_torchs_checksums():
            save_together(state, storage_writer=writer, planner=SnapshotPlanner(), process_group=ranks.group)
    future: Future[Any] = Future()
    future.set_result(None)
    return Saving(path, future)


def _save_in_background(path: Path, state: dict[str, Any], options: SaveOptions, ranks: Together) -> Saving:
    """Save in a thread, over a process group of its own, since the training goes on using the other."""
    future = async_save(
        state,
        storage_writer=CheckpointWriter(path, ranks.world, options.keep),
        planner=SnapshotPlanner(),
        process_group=_background.group(ranks),
        async_stager=_AlreadyStaged(),
    )
    assert isinstance(future, Future)  # a stager that does not wait would make it another
    _background.last = Saving(path, future)
    return _background.last


class _AlreadyStaged(AsyncStager):
    """Tells torch that the state is a copy already."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


# ---- what is saved
def _check(path: Path, options: SaveOptions) -> None:
    if options.keep is not None:
        whole_number("keep", options.keep, 1, "a number of checkpoints, 1 or more, or None", CheckpointError)
        check_keep(path)
    if options.extra is not None:
        instance("extra", options.extra, Mapping, "is not a dictionary", "a dictionary", CheckpointError)


def _extra(extra: Mapping[str, Any] | None) -> dict[str, Serialized]:
    """Serialize each value, and objects by their state_dict()."""
    found = {}
    for key, value in (extra or {}).items():
        instance("extra", key, str, "is a key that is not a text", "texts as keys", CheckpointError)
        found[key] = serialized(value.state_dict() if has_state(value) else value, f"extra[{key!r}]")
    return found


def has_state(value: Any) -> bool:
    """Has it a state dict, as schedulers, scalers and loaders have?"""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _with_all_groups(optimizer: dict[str, Any] | None, ranks: Together) -> dict[str, Any] | None:
    """Merge the parameter groups of all ranks of a pipeline, each of which has other parameters."""
    by_rank = ranks.everybody(None if optimizer is None else optimizer["param_groups"])
    if optimizer is None:
        return None
    return {**optimizer, "param_groups": merged_groups([groups for groups in by_rank if groups is not None])}


def _state(subject: Subject, optimizer: dict[str, Any] | None, rank: int, *, copy: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": snapshots(subject.model_state(), "model", copy=copy),
        "rng": {str(rank): snapshot(generator_states(), "rng", copy=copy)},
    }
    if optimizer is not None:
        groups = snapshot(optimizer["param_groups"], "optimizer.param_groups", copy=copy)
        kept = {name: _kept(each, f"optimizer.state.{name}", copy) for name, each in optimizer["state"].items()}
        state["optimizer"] = {"state": kept, "param_groups": groups}
    return state


def _kept(value: Any, name: str, copy: bool) -> Any:
    """What an optimizer keeps for a parameter, or under a key of its own."""
    return snapshots(value, name, copy=copy) if isinstance(value, Mapping) else snapshot(value, name, copy=copy)


# ---- torch's errors and warnings
@contextmanager
def _as_our_error() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        first = {rank: failure[0] for rank, failure in error.failures.items()}
        texts = "; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(first.items()))
        raise CheckpointError(f"rg.save() failed: {texts}") from next(iter(first.values()))


@contextmanager
def _alone_without_warning(ranks: Together) -> Iterator[None]:
    """Silence torch's warning that one process saves alone."""
    with warnings.catch_warnings():
        if ranks.alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
