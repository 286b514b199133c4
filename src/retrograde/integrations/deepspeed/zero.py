"""`zero.Init` and `zero.GatheredParameters`."""

import contextlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.integrations.deepspeed.engine import DeepSpeedEngine
from retrograde.integrations.deepspeed.owners import engine_of
from retrograde.integrations.deepspeed.refusals import not_yet, wrong


class Init:
    """A context in which a model is made. DeepSpeed would cut up its parameters as they come.

    Here the model is made whole, in the host's memory, so that any code can initialize it, and `initialize()` shards
    it. (A model that is too large for this is made under `torch.device("meta")`.)"""

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        enabled: bool = True,
        remote_device: str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            raise not_yet("zero.Init(remote_device)", "offload to disks", "leave it out")
        self._dtype = dtype if enabled else None
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        """Make `dtype`, if it was given, the default dtype inside."""
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype or self._before[-1])

    def __exit__(self, *raised: object) -> None:
        torch.set_default_dtype(self._before.pop())


class GatheredParameters:
    """Inside, the given parameters are whole: `p` and `module.weight` alike, without any communication.

    With `modifier_rank`, all ranks have at the end what that rank has made of the parameters; all ranks enter and leave
    together. Without it, the parameters may only be read."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | torch.Tensor,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._parameters = [rg.parameter_of(each) for each in given] if enabled else []
        self._modifier = modifier_rank
        self._open = contextlib.ExitStack()
        world = dist.get_world_size() if dist.is_initialized() else 1
        if modifier_rank is not None and modifier_rank not in range(world):
            raise wrong("modifier_rank", modifier_rank, f"is not one of {world} ranks", "a rank, or None")

    def __enter__(self) -> None:
        with contextlib.ExitStack() as opened:
            for engine, parameters in _by_engine(self._parameters).items():
                holder = nn.ParameterList(parameters)
                opened.enter_context(engine.sharded.full_params(holder, writer=self._modifier, leaves=True))
            self._open = opened.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
        if self._modifier is not None and dist.is_initialized():
            for each in self._parameters:
                if engine_of(each) is None:  # the parameter is not sharded yet
                    dist.broadcast(each.detach(), self._modifier)


def _by_engine(parameters: Sequence[torch.Tensor]) -> dict[DeepSpeedEngine, list[torch.Tensor]]:
    """Sort parameters by engine. Those that no engine has are left out, since they are whole."""
    found: dict[DeepSpeedEngine, list[torch.Tensor]] = {}
    for each in parameters:
        engine = engine_of(each)
        if engine is not None:
            found.setdefault(engine, []).append(each)
    return found
