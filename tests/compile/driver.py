"""Plays cases of the matrix with compiled models, on both sides, and counts graphs."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tests.live import settle
from tests.patterns.context import Context
from tests.patterns.driver import Player
from tests.patterns.oracle import Oracle
from tests.patterns.registry import Case
from tests.patterns.trace import differences


class How(enum.Enum):
    """What is compiled: the whole model as people do it, or its units by `rg.compile`."""

    MODEL = "model"
    UNITS = "units"


@dataclass(frozen=True)
class Compiled:
    how: How
    backend: str = "aot_eager"
    mode: str | None = None
    dynamic: bool | None = None

    def apply(self, model: nn.Module, sharded: bool) -> None:
        import retrograde as rg

        given = {"backend": self.backend, "mode": self.mode, "dynamic": self.dynamic}
        if self.how is How.MODEL:
            model.compile(**given)
        elif sharded:
            rg.compile(model, **given)
        else:
            for module in equal_parts(model):
                module.compile(**given)


def equal_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a plain model that are graphs of their own in a sharded one."""
    from retrograde.compiling.regions import find
    from retrograde.layout import find_units

    return find(model, [module for spec in find_units(model, "auto") for module in spec.modules])


def fresh() -> None:
    """Nothing compiled before counts. What plain torch compiled may be retained too, as everywhere in the matrix."""
    settle()
    torch._dynamo.reset()
    counters.clear()
    torch._functorch.config.donated_buffer = False


def compiled_case(case: Case, compiled: Compiled) -> Case:
    def setup(model: nn.Module, ctx: Context) -> None:
        if case.setup is not None:
            case.setup(model, ctx)
        for name in case.sharded:
            part = model.get_submodule(name)
            compiled.apply(part, sharded="_retrograde_engine" in dir(type(part)))

    return replace(case, setup=setup)


def play_compiled(rank: int, world: int, case: Case | str, stage: int, compiled: Compiled) -> list[str]:
    """A task for the pool: how this rank differs from plain torch, compiled in the same way."""
    from tests.compile.models import COMPILE_CASES
    from tests.patterns.rows import CASES

    fresh()
    chosen = compiled_case((COMPILE_CASES | CASES)[case] if isinstance(case, str) else case, compiled)
    got = Player(chosen, rank, world, stage).play()
    if not counters["stats"]["unique_graphs"]:
        return ["nothing was compiled"]
    dist.barrier()  # a rank that drops its model takes its shards along, and others may still be reading
    torch._dynamo.reset()
    want = Oracle(chosen, world, stage).play()[rank]
    return differences(got, want, chosen.rtol)
