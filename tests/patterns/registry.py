"""What a row of the matrix is, and the list of all of them.

Vocabulary: a *row* is a way to use backward. A *case* is a row with a model. A *phase* is the stretch of a
step between two optimizer steps; most rows have one, a GAN has two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from retrograde.layout import Precision
from tests.patterns.context import Context
from tests.patterns.models import SPECS, Batch, Spec
from tests.reference import LeafHook

Run = Callable[[nn.Module, Batch, Context], None]
ModelHook = Callable[[nn.Module, Context], None]
Together = Callable[[Sequence[nn.Module], Sequence[Batch], Sequence[Context]], None]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Powers of two: their products are exact, so that a fused multiply-add, which the kernels use or not depending on
    where a tensor starts, cannot make a difference."""
    return torch.optim.SGD(params, lr=2**-4, momentum=2**-1)


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@dataclass(frozen=True)
class Phase:
    """`run` fills gradients; then the parameters whose names start with `scope` take a step."""

    run: Run
    scope: str = ""


@dataclass(frozen=True)
class Case:
    """Everything about a row that both sides, ours and plain torch's, have to know."""

    key: str
    title: str
    model: str
    phases: tuple[Phase, ...]
    setup: ModelHook | None = None  # once, after sharding
    edit: ModelHook | None = None  # between the gradients and the optimizer's step
    after: ModelHook | None = None  # after the optimizer's step
    leaf_hook: LeafHook | None = None  # register_post_accumulate_grad_hook on every leaf
    together: Together | None = None  # the reference, where one rank's gradient depends on all ranks' data
    sharded: tuple[str, ...] = ("",)  # the submodules that are sharded, each by an engine of its own
    optimizer: MakeOptimizer = momentum
    optimizer_steps: bool = True
    take_step: Callable[[torch.optim.Optimizer], None] = step
    optimizer_first: bool = False  # the optimizer is made before sharding
    keep_grads: bool = False  # no zero_grad between steps
    rtol: float = 0.0  # whoever sets it says why
    principal: bool = True  # the others are left out where time is short: at world 4 in the test suite
    precision: str | None = None  # that of `rg.shard`; the data are in it too
    offload: str | None = None  # that of `rg.shard`
    whole: str | None = None  # that of `rg.shard`
    most_replicas: int = 1  # of the sharded model, as far as the world can be divided by them
    steps: int = 3  # enough to compare a step's memory with the step before it, momentum included

    @property
    def id(self) -> str:
        return f"{self.key}-{self.phases[0].run.__name__}-{self.model}"

    def replicas(self, world: int) -> int:
        return math.gcd(self.most_replicas, world)

    @property
    def spec(self) -> Spec:
        spec = SPECS[self.model]
        return spec if self.precision is None else spec.in_dtype(Precision.of(self.precision).page)


CASES: dict[str, Case] = {}


def row(
    key: str, title: str, models: Iterable[str] = ("mlp",), *, variants: bool = False, **options: Any
) -> Callable[[Run], Run]:
    """Registers the decorated function as row `key`, once per model.

    `variants`: the row is about the difference between its models, so that all of them are principal."""

    def register(run: Run) -> Run:
        base = Case(key, title, "", (Phase(run),), **options)
        for index, model in enumerate(models):
            add(replace(base, model=model, principal=variants or index == 0))
        return run

    return register


def add(case: Case) -> None:
    assert case.id not in CASES, f"two cases are called {case.id}"
    assert case.model in SPECS, f"{case.id}: there is no such model"
    CASES[case.id] = case
