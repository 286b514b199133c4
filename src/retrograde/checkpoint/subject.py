"""The subject of a checkpoint: a model, or this rank's stages of a pipeline, with its optimizers."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from retrograde.arguments import instance
from retrograde.engine import Engine
from retrograde.engine.named_state import named_state, names_of
from retrograde.errors import CheckpointError
from retrograde.parameters.access import engine_of
from retrograde.pipeline.pipeline import Pipeline

Saveable = nn.Module | Engine | Pipeline
Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True)
class Subject:
    """Modules, each with its prefix in the whole model's names, and optimizers over their parameters."""

    modules: tuple[tuple[str, nn.Module], ...]
    names: dict[nn.Parameter, str]
    optimizers: tuple[Optimizer, ...]
    is_part: bool  # true if other ranks have other modules

    @property
    def engines(self) -> list[Engine]:
        found = {id(engine): engine for _, module in self.modules for engine in _engines(module)}
        return list(found.values())

    def finish_edits(self) -> None:
        """Bring edits of full tensors into the shards. All ranks call it together."""
        for engine in self.engines:
            engine.flow.recover()
            engine.pager.quiesce()

    def model_state(self) -> dict[str, Any]:
        """The state dict by the names of the whole model, with sharded tensors that share the model's memory."""
        state: dict[str, Any] = {}
        with _sharded(self.engines):
            for prefix, module in self.modules:
                state |= module.state_dict(prefix=prefix)
        return state

    def names_of_parameters(self) -> set[str]:
        """All names of parameters in `model_state()`, also the further ones of tied parameters."""
        return {
            prefix + name
            for prefix, module in self.modules
            for name, _ in module.named_parameters(remove_duplicate=False)
        }

    def names_of_buffers(self) -> set[str]:
        return {
            prefix + name for prefix, module in self.modules for name, _ in module.named_buffers(remove_duplicate=False)
        }

    def optimizer_state(self) -> dict[str, Any]:
        return named_state(self.optimizers, self.names)


def subject_of(model: Saveable, optimizer: Optimizers) -> Subject:
    optimizers = _optimizers(optimizer)
    if isinstance(model, Pipeline):
        blocks = tuple((f"{name}.", module) for name, module in model.named_blocks())
        names = {param: name for name, param in model.named_parameters()}
        return Subject(blocks, names, optimizers, is_part=True)
    module = model.model if isinstance(model, Engine) else model
    instance("model", module, nn.Module, "is not a model", "a module, an engine or a pipeline", CheckpointError)
    return Subject((("", module),), names_of(module), optimizers, is_part=False)


def _optimizers(given: Any) -> tuple[Optimizer, ...]:
    optimizers = () if given is None else (given,) if isinstance(given, Optimizer) else given
    fix = "an optimizer, a list of them, or None"
    for each in instance("optimizer", optimizers, (tuple, list), "is not an optimizer", fix, CheckpointError):
        instance("optimizer", each, Optimizer, "is not an optimizer", fix, CheckpointError)
    return tuple(optimizers)


def _engines(module: nn.Module) -> Iterator[Engine]:
    for part in module.modules():
        engine = engine_of(part)
        if isinstance(engine, Engine):
            yield engine


@contextlib.contextmanager
def _sharded(engines: Sequence[Engine]) -> Iterator[None]:
    """Make state dicts inside have sharded tensors."""
    for engine in engines:
        engine.saves_shards = True
    try:
        with torch.no_grad():
            yield
    finally:
        for engine in engines:
            engine.saves_shards = False
