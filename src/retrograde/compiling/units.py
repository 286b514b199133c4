"""`compile()` compiles each unit of a sharded model as a graph of its own.

`torch.compile(model)` finds the same boundaries by itself (regions.py). Compiling per unit leaves the code
between units alone, so nothing depends on what Dynamo makes of it, and `fullgraph=True` means that each unit is one
graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from retrograde.arguments import check_module, flag, instance, one_of, wrong
from retrograde.compiling.backend import Graph, Keeping
from retrograde.compiling.regions import regions_of
from retrograde.errors import ShardingError
from retrograde.torch_internals import backend_with, inductor_modes, inductor_options, inductor_with


def compile(
    model: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> nn.Module:
    """Compile the units of a sharded `model`, in place, and return it. The arguments are torch.compile's.

    Graphs may be retained (`retain_graph=True`), which torch.compile refuses unless it is told before.
    """
    regions = regions_of(check_module("model", model))
    if not regions:
        raise ShardingError(
            f"compile({type(model).__name__}): the model is not sharded; call retrograde.shard() first, or "
            f"torch.compile() for a model that is to stay whole"
        )
    if dynamic is not None and not isinstance(dynamic, bool):
        raise wrong("dynamic", dynamic, "is neither true nor false", "True, False or None")
    flag("fullgraph", fullgraph)
    keeping = Keeping(_inner(backend, mode, options, dynamic), next(iter(regions.values())).services)
    compiled: dict[Graph, Graph] = {}  # one callable for all units of a class: they share their graphs
    for region in regions.values():
        if region.plain not in compiled:
            compiled[region.plain] = torch.compile(region.plain, backend=keeping, dynamic=dynamic, fullgraph=fullgraph)
        region.compiled = compiled[region.plain]
    return model


def _inner(
    backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Graph:
    if mode is not None and options is not None:
        raise ShardingError("compile(): give mode or options, not both, as with torch.compile()")
    if not callable(backend):
        backends = torch.compiler.list_backends(exclude_tags=())
        one_of("backend", backend, backends, f"a callable or one of {', '.join(backends)}")
    if options is not None:
        instance("options", options, dict, "is not a dictionary", "a dictionary or None")
    if backend != "inductor":  # another backend checks its own modes and options
        return backend_with(backend, mode, options, dynamic)
    if mode is not None:
        modes = inductor_modes()
        one_of("mode", mode, modes, f"None or one of {', '.join(modes)}")
    known = inductor_options()
    for name in options or ():
        if str(name).replace("-", "_") not in known:
            cause = f"has {name!r}, which Inductor does not know"
            raise wrong("options", options, cause, "names from torch._inductor.list_options()")
    try:
        return inductor_with(mode, options, dynamic)
    except RuntimeError as error:  # an option of another type
        raise wrong("options", options, f"is refused: {error}", "values of the types that Inductor has") from error
