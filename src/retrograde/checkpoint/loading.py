"""Loading: a plan of what goes where, a check of everything that will be read, and then the reading.

Nothing of the model changes before every rank has found all that it needs, and checked that it is what was saved. Then
each rank reads its own parts straight into their places. So loading needs no second copy in memory; only an optimizer's
state that does not exist yet takes memory.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from retrograde.arguments import instance
from retrograde.checkpoint.formats.opening import open_checkpoint
from retrograde.checkpoint.generators import set_generator_states
from retrograde.checkpoint.progress import ProgressBar
from retrograde.checkpoint.ranks import Together
from retrograde.checkpoint.saving import has_state
from retrograde.checkpoint.stored import Checkpoint, Extent, check_shape, is_tensor, value_of
from retrograde.checkpoint.subject import Optimizers, Saveable, Subject, subject_of
from retrograde.checkpoint.targets import Fill, distinct, leaf_of, leave_to_write, memory_of
from retrograde.engine.named_state import numbered_names, numbered_state
from retrograde.errors import CheckpointError
from retrograde.parameters import ShardedParameter
from retrograde.parameters.ownership import updated_elsewhere
from retrograde.parameters.sharded_tensor import ShardedTensor
from retrograde.parameters.state import is_number, numbers_in

NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The options that the user gave to load."""

    extra: Mapping[str, Any] | None
    strict: bool
    progress: bool | None
    group: dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What this rank has taken from a checkpoint. `str(loaded)` says it in words."""

    path: Path
    origin: str
    weights: tuple[str, ...]
    states: Mapping[str, tuple[str, ...]]  # by parameter, the names of optimizer states
    extra: Mapping[str, Any]  # what was saved as `extra`, without what was loaded into objects
    extra_by_rank: tuple[Mapping[str, Any], ...]  # for each rank that saved, what was not the same on all ranks
    notes: tuple[str, ...]  # what was not taken, and why

    def __str__(self) -> str:
        kinds = sorted({key for keys in self.states.values() for key in keys})
        lines = [
            f"{self.path} ({self.origin})",
            f"weights: {len(self.weights)} parameters and buffers",
            f"optimizer: {', '.join(kinds) or 'nothing'} of {len(self.states)} parameters",
            f"extra: {', '.join(self.extra) or 'nothing'}",
        ]
        return "\n".join([*lines, *(f"not taken: {note}" for note in self.notes)])


@dataclasses.dataclass
class Plan:
    """What of a checkpoint goes where."""

    weights: list[Fill]
    objects: dict[str, Any]  # entries of the model's state dict that are no weights, for load_state_dict()
    states: list[Fill]
    optimizers: list[tuple[Optimizer, dict[str, Any]]]  # each with what its load_state_dict() gets
    extra: dict[str, Any]
    extra_by_rank: list[dict[str, Any]]
    rng: dict[str, Any] | None
    notes: list[str]

    @property
    def bytes(self) -> int:
        return sum(fill.bytes for fill in (*distinct(self.weights), *self.states))


def load_checkpoint(
    path: Path,
    model: Saveable,
    optimizer: Optimizers,
    options: LoadOptions,
    opened: Callable[[Path], Checkpoint] = open_checkpoint,
) -> Loaded:
    """Load a checkpoint. `opened` opens one of its format."""
    ranks = Together(options.group)
    with contextlib.ExitStack() as files:
        with ranks.one_fate("rg.load()"):
            subject = subject_of(model, optimizer)
            checkpoint = files.enter_context(opened(path))
            plan = _plan(checkpoint, subject, options, ranks)
            for fill in (*plan.weights, *plan.states):
                fill.check()
        _check_same(checkpoint, ranks)
        with ProgressBar(f"loading {path.name}", ranks.rank == 0 and options.progress, plan.bytes) as progress:
            with leave_to_write(subject.engines):
                for fill in (*distinct(plan.weights), *plan.states):
                    fill.apply()
                    progress.told(fill.bytes)
    _load_objects(subject, plan.objects)
    for each, state in plan.optimizers:
        each.load_state_dict(state)
    if plan.rng is not None:
        set_generator_states(plan.rng)
    extra = _into_objects(plan.extra, options.extra or {})
    return _report(checkpoint, plan, extra)


def _check_same(checkpoint: Checkpoint, ranks: Together) -> None:
    """Raise on all ranks unless all have opened the same save. (Each may have a copy of it, in a folder of its own.)"""
    first, *others = ranks.everybody((checkpoint.saved_at, str(checkpoint.folder)))
    for rank, other in enumerate(others, 1):
        if other[0] != first[0]:
            raise CheckpointError(
                f"rg.load(): rank 0 has {first[1]} and rank {rank} {other[1]}, which were not saved together; give all "
                f"ranks the same checkpoint"
            )


def _plan(checkpoint: Checkpoint, subject: Subject, options: LoadOptions, ranks: Together) -> Plan:
    plan = Plan([], {}, [], [], value_of(checkpoint.extra), [], None, list(checkpoint.notes))
    saved_by = len(checkpoint.rng)
    own = str(ranks.rank)
    _plan_weights(plan, _as_own(checkpoint, own, saved_by == ranks.world), subject, options.strict)
    if subject.optimizers:
        _plan_optimizers(plan, checkpoint, subject)
    if saved_by == ranks.world and own in checkpoint.rng:
        plan.rng = value_of(checkpoint.rng[own])
        plan.extra |= value_of(checkpoint.extra_by_rank.get(own, {}))
    elif saved_by:
        plan.notes.append(f"random generators: saved by {saved_by} ranks, here are {ranks.world}")
        names = sorted({name for each in checkpoint.model_by_rank.values() for name in each})
        plan.notes += [f"{name}: each of {saved_by} ranks had its own, and here are {ranks.world}" for name in names]
    if checkpoint.extra_by_rank:
        plan.extra_by_rank = [value_of(checkpoint.extra_by_rank.get(str(rank), {})) for rank in range(saved_by)]
    _check_extra(plan, options.extra, saved_by, ranks.world)
    return plan


# ---- weights
def _as_own(checkpoint: Checkpoint, rank: str, as_many: bool) -> Checkpoint:
    """The checkpoint with this rank's own buffers, where ranks had each their own and here are as many."""
    own = checkpoint.model_by_rank.get(rank, {}) if as_many else {}
    return dataclasses.replace(checkpoint, model={**checkpoint.model, **own})


def _plan_weights(plan: Plan, checkpoint: Checkpoint, subject: Subject, strict: bool) -> None:
    here = subject.model_state()
    memory = _memory(subject)
    tied = _tied(here, checkpoint)
    missing = [name for name in here if name not in checkpoint.model and name not in tied]
    left = [] if subject.is_part else [name for name in checkpoint.model if name not in here]
    if strict and (missing or left):
        raise CheckpointError(
            f"{checkpoint.folder}: {_listed('it has no', missing)}{_listed('this model has no', left)}give the model "
            f"that was saved, or strict=False to load what both have"
        )
    for name, value in here.items():
        if name in tied:
            continue  # the checkpoint has the parameter under its other name
        if name in missing:
            plan.notes.append(f"{name}: the checkpoint has none")
        elif _is_own(value, memory) and is_tensor(checkpoint.model[name]):
            check_shape(name, checkpoint.model[name], value.shape)
            plan.weights.append(Fill(name, checkpoint.model[name], leaf_of(value)))
        else:
            plan.objects[name] = value_of(checkpoint.model[name])
    plan.notes += [f"{name}: this model has none" for name in left]


def _tied(here: Mapping[str, Any], checkpoint: Checkpoint) -> set[str]:
    """Names of tied parameters that the checkpoint has only under another name."""
    tensors = {name: memory_of(value) for name, value in here.items() if isinstance(value, torch.Tensor)}
    there = {memory for name, memory in tensors.items() if name in checkpoint.model}
    return {name for name, memory in tensors.items() if name not in checkpoint.model and memory in there}


def _listed(words: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{words} {', '.join(names[:NAMES_SHOWN])}{more}; "


def _memory(subject: Subject) -> set[Hashable]:
    """The memory of parameters and buffers. (Modules may put other things into a state dict: objects, and copies.)"""
    found: set[Hashable] = set()
    for _, module in subject.modules:
        for own in (module.named_parameters, module.named_buffers):
            found |= {memory_of(tensor) for _, tensor in own(remove_duplicate=False)}
    return found


def _is_own(value: Any, memory: set[Hashable]) -> bool:
    """Is an entry of a state dict a parameter or a buffer itself? What a hook has made of one is not: filling it would
    leave the model as it is."""
    return isinstance(value, torch.Tensor) and (value.numel() == 0 or memory_of(value) in memory)


def _load_objects(subject: Subject, objects: dict[str, Any]) -> None:
    for prefix, module in subject.modules:
        own = {name.removeprefix(prefix): value for name, value in objects.items() if name.startswith(prefix)}
        if own:
            module.load_state_dict(own, strict=False)


# ---- optimizers
def _plan_optimizers(plan: Plan, checkpoint: Checkpoint, subject: Subject) -> None:
    if not checkpoint.groups and not checkpoint.state:
        raise CheckpointError(f"{checkpoint.folder} has no optimizer's state; load the model alone (optimizer=None)")
    if checkpoint.numbered and len(subject.optimizers) > 1:
        raise CheckpointError(f"{checkpoint.folder} numbers the parameters of one optimizer, and here are several")
    for optimizer in subject.optimizers:
        names = numbered_names(optimizer, subject.names)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        elsewhere = updated_elsewhere(optimizer)
        found = [checkpoint.state.get(str(n) if checkpoint.numbered else name) for n, name in enumerate(names)]
        numbers = numbers_in((param, saved) for param, saved in zip(params, found, strict=True) if saved is not None)
        state: dict[str, Any] = {}
        for name, param, saved in zip(names, params, found, strict=True):
            if saved is not None and param not in elsewhere:
                kept = optimizer.state.get(param, {})
                state[name] = {
                    key: _target(plan, f"{key} of {name}", each, param, kept.get(key), is_number(key, param, numbers))
                    for key, each in saved.items()
                }
        state |= _of_no_parameter(plan, checkpoint, subject)
        groups = _by_name(checkpoint.groups, names) if checkpoint.numbered else list(checkpoint.groups)
        named = {"state": state, "param_groups": groups}
        plan.optimizers.append((optimizer, numbered_state(named, optimizer, subject.names)))


def _of_no_parameter(plan: Plan, checkpoint: Checkpoint, subject: Subject) -> dict[str, Any]:
    """What an optimizer has kept under keys of its own, such as a counter for all parameters."""
    params = {str(param) for group in checkpoint.groups for param in group["params"]} | set(subject.names.values())
    kept = {key: value for key, value in checkpoint.state.items() if key not in params}
    if len(subject.optimizers) > 1:
        note = "optimizer: {} is of no parameter, and which of the optimizers has kept it is not known"
        plan.notes += [note.format(key) for key in kept if note.format(key) not in plan.notes]
        return {}
    return {key: value_of(value) for key, value in kept.items()}


def _by_name(groups: Any, names: list[str]) -> list[dict[str, Any]]:
    if sum(len(group["params"]) for group in groups) != len(names):
        raise CheckpointError(f"optimizer: the checkpoint numbers other parameters than the {len(names)} here")
    return [{**group, "params": [names[number] for number in group["params"]]} for group in groups]


def _target(plan: Plan, what: str, saved: Any, param: nn.Parameter, kept: Any, number: bool) -> Any:
    """A tensor that is filled later from the saved one; a saved value that is no tensor is read at once.

    `kept`: what the optimizer has there now. `number`: it has no elements of the parameter."""
    if not is_tensor(saved):
        return value_of(saved)
    if saved.shape != param.shape:
        saved.check(Extent.all_of(saved.shape))  # does the file have this much? Then memory is taken for it
    into = _memory_for(saved.shape, saved.dtype, None if number else param, kept)
    plan.states.append(Fill(what, saved, into))
    return into


def _memory_for(shape: torch.Size, dtype: torch.dtype, param: nn.Parameter | None, kept: Any) -> torch.Tensor:
    """Memory for a state: that of the present one if it fits. In the parameter's shape it is sharded as that is, but
    not if it has nothing to do with its elements (`param` is None)."""
    there = isinstance(kept, torch.Tensor) and kept.shape == shape and kept.dtype == dtype
    if isinstance(param, ShardedParameter) and shape == param.shape:
        if there and isinstance(kept, ShardedTensor) and kept.cut_like(param):
            return kept
        return torch.empty_like(param.detach(), dtype=dtype)
    if there and type(kept) is torch.Tensor:
        return kept
    return torch.empty(shape, dtype=dtype)


# ---- extra
def _check_extra(plan: Plan, objects: Mapping[str, Any] | None, saved_by: int, world: int) -> None:
    if objects is None:
        return
    fix = "a dictionary of objects with load_state_dict()"
    for key, value in instance("extra", objects, Mapping, "is not a dictionary", fix, CheckpointError).items():
        if not has_state(value):
            raise CheckpointError(f"extra[{key!r}] has no load_state_dict(); give {fix}, and find values in .extra")
        if key not in plan.extra:
            differs = any(key in each for each in plan.extra_by_rank)
            why = f"was saved by {saved_by} ranks, each its own, and here are {world}" if differs else "was not saved"
            raise CheckpointError(f"extra[{key!r}] {why}; leave it away, and find what there is in the result")


def _into_objects(extra: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in objects.items():
        value.load_state_dict(extra[key])
    return {key: value for key, value in extra.items() if key not in objects}


def _report(checkpoint: Checkpoint, plan: Plan, extra: dict[str, Any]) -> Loaded:
    states: dict[str, list[str]] = {}
    for fill in plan.states:
        key, _, name = fill.name.partition(" of ")
        states.setdefault(name, []).append(key)
    return Loaded(
        checkpoint.folder,
        checkpoint.origin,
        tuple(fill.name for fill in plan.weights) + tuple(plan.objects),
        {name: tuple(keys) for name, keys in states.items()},
        extra,
        tuple(plan.extra_by_rank),
        tuple(plan.notes),
    )
