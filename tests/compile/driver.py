"""Plays cases of the matrix with compiled models, on both sides, and counts graphs."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tests.harness import RankError, RankPool
from tests.live import settle
from tests.patterns.context import Context
from tests.patterns.driver import Player
from tests.patterns.oracle import Oracle
from tests.patterns.registry import Case
from tests.patterns.trace import Trace, differences


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
        if self.how is How.MODEL and (sharded or not getattr(model, "skipped_when_sharded", False)):
            model.compile(**given)
        elif sharded:
            rg.compile(model, **given)
        else:
            for module in equal_parts(model):
                # Not by `module.compile()`: Dynamo starts no graph in torch's own files, so modules of torch's classes
                # would stay eager.
                module._compiled_call_impl = torch.compile(_own_frame(module), **given)


def _own_frame(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo counts recompilations by code
    return call


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


def _case(name: Case | str, compiled: Compiled | None) -> Case:
    from tests.compile.models import COMPILE_CASES
    from tests.patterns.rows import CASES

    case = (COMPILE_CASES | CASES)[name] if isinstance(name, str) else name
    return case if compiled is None else compiled_case(case, compiled)


def _play(rank: int, world: int, case: Case | str, stage: int, compiled: Compiled) -> tuple[Trace, int]:
    """A task for the pool: what was seen, and how many graphs there were."""
    fresh()
    got = Player(_case(case, compiled), rank, world, stage).play()
    dist.barrier()  # a rank that drops its model takes its shards along, and others may still be reading
    return got, counters["stats"]["unique_graphs"]


def compare(
    pool: RankPool, case: Case | str, stage: int, compiled: Compiled, timeout: float, to_eager: bool = False
) -> list[str]:
    """How the ranks differ from plain torch, compiled in the same way. What torch refuses is to be refused here too."""
    chosen, want, refused = _case(case, None if to_eager else compiled), [], []

    def reference() -> None:
        torch._dynamo.reset()
        counters.clear()
        with torch._functorch.config.patch(donated_buffer=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo looks at .grad of tensors that are no leaves
            try:
                want.extend(Oracle(chosen, pool.world, stage).play())
            except RuntimeError as error:
                refused.append(str(error))

    found = []
    try:
        played = pool.run(_play, case, stage, compiled, timeout=timeout, beside=reference)
    except RankError as error:
        if refused and refused[0] in str(error):
            return []
        raise
    if refused:
        return [f"plain torch refuses this: {refused[0]}"]
    if counters["stats"]["unique_graphs"] and not any(graphs for _, graphs in played):
        return ["nothing was compiled"]
    for rank, (got, _) in enumerate(played):
        found += [f"rank {rank}: {text}" for text in differences(got, want[rank], chosen.rtol)]
    return found
