"""`compile()`: each unit of a sharded model as a graph of its own.

`torch.compile(model)` finds the same boundaries by itself (residency/regions.py). Compiling per unit leaves the code
between units alone, so nothing depends on what Dynamo makes of it, and `fullgraph=True` means that each unit is one
graph.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from retrograde.errors import ShardingError
from retrograde.residency import regions_of

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


def compile(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the units of a sharded `model`, in place, and return it. `options` are torch.compile's.

    Graphs may be retained (`retain_graph=True`), which torch.compile alone refuses by default with backends that
    write into what was saved.
    """
    regions = regions_of(model)
    if not regions:
        raise ShardingError(
            f"compile({type(model).__name__}): the model is not sharded; call retrograde.shard() first, or "
            f"torch.compile() for a model that shall stay whole"
        )
    backend = _keeping(options.pop("backend", "inductor"), options)
    compiled: dict[Any, Any] = {}  # one callable for all units of a class, so that they share their graphs
    for region in regions.values():
        if region.plain not in compiled:
            compiled[region.plain] = torch.compile(region.plain, backend=backend, **options)
        region.compiled = compiled[region.plain]
    return model


def _keeping(backend: Any, options: dict[str, Any]) -> Backend:
    ...
