"""What a row may ask of the side it runs on.

Rows are written once and run on plain torch and on a sharded model. Nearly all they do is plain torch; the
few things that differ (a window, a full weight, noticing `zero_grad`) go through a context.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from retrograde.parameters.part import Part
from tests.patterns.models import Batch, Spec, logits_of

Record = tuple[str, Any]


class Context(ABC):
    """Common to both sides. `records` are compared with the same rank's records on the other side."""

    def __init__(self, spec: Spec, rank: int, world: int) -> None:
        self.spec = spec
        self.rank = rank
        self.world = world
        self.step = 0
        self.optimizers: list[Optimizer] = []  # of the sharded model, once they are made
        self.memo: dict[str, Any] = {}
        self.records: list[Record] = []

    def micro(self, index: int) -> Batch:
        """Another batch of this rank and step."""
        return self.spec.batch(self.rank, self.step + 100 * (index + 1))

    def loss(self, out: Any, batch: Batch) -> Tensor:
        value = self.spec.loss(out, batch.y)
        self.record("loss", value)
        return value

    def aux(self, out: Any) -> Tensor:
        """A second loss on the same outputs."""
        value = logits_of(out).pow(2).mean()
        self.record("aux", value)
        return value

    def record(self, name: str, value: Any) -> None:
        self.records.append((name, value.detach().clone() if isinstance(value, Tensor) else value))

    @contextlib.contextmanager
    def raises(self, *kinds: type[Exception]) -> Iterator[None]:
        """The block must raise, on both sides."""
        try:
            yield
        except kinds as error:
            self.record("raised", next(kind.__name__ for kind in kinds if isinstance(error, kind)))
        else:
            raise AssertionError(f"nothing raised on rank {self.rank}, expected {kinds}")

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None: ...

    @abstractmethod
    def assign_grads(self, grads: dict[str, Tensor | None]) -> None:
        """`p.grad = g` by hand, by parameter name."""

    @abstractmethod
    def coalesce(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def full_params(self, *modules: nn.Module, write: bool = False) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def full_state(self) -> dict[str, Tensor]:
        """Detached copies of all parameters in their true shapes."""

    @abstractmethod
    def reductions(self) -> dict[str, int] | None:
        """How often each unit was reduced since the last call; None on plain torch, where nothing is."""


class ModelContext(Context):
    """A side whose gradients are in its model."""

    def __init__(self, spec: Spec, rank: int, world: int, model: nn.Module) -> None:
        super().__init__(spec, rank, world)
        self._model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)

    def assign_grads(self, grads: dict[str, Tensor | None]) -> None:
        for name, leaf in self._model.named_parameters():
            if name in grads:
                leaf.grad = grads[name]


class EngineContext(ModelContext):
    """The side under test."""

    def __init__(self, spec: Spec, rank: int, world: int, model: nn.Module, engines: Sequence[Any]) -> None:
        super().__init__(spec, rank, world, model)
        self._engines = engines

    def record(self, name: str, value: Any) -> None:
        """What is sharded is recorded whole, so on all ranks."""
        super().record(name, value.full_tensor() if isinstance(value, Part) else value)

    @property
    def engine(self) -> Any:
        (engine,) = self._engines
        return engine

    def coalesce(self) -> AbstractContextManager[Any]:
        return self.engine.coalesce()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.engine.no_sync()

    def full_params(self, *modules: nn.Module, write: bool = False) -> AbstractContextManager[Any]:
        return self.engine.full_params(*modules, write=write)

    def full_state(self) -> dict[str, Tensor]:
        full = {name: value.detach().clone() for name, value in self.engine.iter_full_params()}
        return {name: full[name] for name, _ in self._model.named_parameters()}

    def reductions(self) -> dict[str, int] | None:
        counts: dict[str, int] = {}
        for event in self.engine.ledger.entries:
            if event.kind in ("reduce", "join"):
                counts[event.unit] = counts.get(event.unit, 0) + 1
        self.engine.ledger.clear()
        return counts


class NaturalContext(ModelContext):
    """Plain torch on one rank, with torch's own gradients: what the oracle must agree with at world 1."""

    def __init__(self, spec: Spec, model: nn.Module) -> None:
        super().__init__(spec, 0, 1, model)

    def coalesce(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def full_params(self, *modules: nn.Module, write: bool = False) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def full_state(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    def reductions(self) -> dict[str, int] | None:
        return None
