"""Backends of torch.compile (Inductor and others), and AOTAutograd before them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch

from retrograde.torch_internals.compiler import Traceable, traceable
from retrograde.torch_internals.probes import When, expect, find, probe, tiny

# ---- the backends
_wrapped: Callable[..., Traceable] = find("torch:_TorchCompileWrapper")
_inductor: Callable[..., Traceable] = find("torch:_TorchCompileInductorWrapper")


def backend_with(
    backend: str | Traceable, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Traceable:
    """A backend other than Inductor, given by name or as a function, as torch.compile calls it with these arguments."""
    return _wrapped(backend, mode, options, dynamic)


def inductor_with(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> Traceable:
    """Inductor, as torch.compile calls it with these arguments. Raises a RuntimeError for an option of another type."""
    return _inductor(mode, options, dynamic)


def inductor_modes() -> list[str]:
    return list(import_module("torch._inductor").list_mode_options())


def inductor_options() -> list[str]:
    return list(import_module("torch._inductor").list_options())


@probe(
    "the backends of torch.compile",
    "backend_with",
    "inductor_with",
    "inductor_modes",
    "inductor_options",
    needed_for="retrograde.compile()",
    otherwise="it refuses modes, options or backends that torch has",
    when=When.DOCTOR,
)
def _backends_can_be_made() -> None:
    """Assumes: torch.compile makes its backends with two classes, and Inductor lists its modes and options."""
    made = backend_with("eager", None, None, None)
    graph = torch.fx.symbolic_trace(lambda tensor: tensor.neg())
    expect(made(graph, [tiny()])(tiny()).tolist(), [-1.0, -1.0], "what a graph computes with the backend 'eager'")
    expect("max-autotune" in inductor_modes(), True, "whether Inductor has the mode 'max-autotune'")
    expect("max_autotune" in inductor_options(), True, "whether Inductor has the option 'max_autotune'")
    chosen: Any = inductor_with("max-autotune", None, False)
    expect(chosen.config["max_autotune"], True, "what the mode chooses")


# ---- what compiled graphs keep
READS_DATA: Any = find("torch._C._autograd:_get_data_attr")
"""What `tensor.data` is in a graph that Dynamo has made."""


def keeping_saved_tensors() -> AbstractContextManager[Any]:
    """Inside, AOTAutograd compiles graphs whose backward can run twice: it does not reuse what they have saved."""
    context: AbstractContextManager[Any] = import_module("torch._functorch.config").patch(donated_buffer=False)
    return context


@probe(
    "what compiled graphs keep",
    "READS_DATA",
    "keeping_saved_tensors",
    needed_for="retain_graph=True in compiled units, and edits of weights in a compiled forward",
    otherwise="a second backward through a compiled unit is refused; an edit through .data is lost",
    when=When.DOCTOR,
)
def _compiled_graphs_keep() -> None:
    """Assumes: Dynamo writes `tensor.data` as a call of `_get_data_attr`, and AOTAutograd's `donated_buffer` is what
    forbids a second backward."""
    targets: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    read = traceable("def run(tensor): return tensor.data * 2")
    torch.compile(read, backend=backend)(tiny())
    expect(READS_DATA in targets, True, "whether a graph that reads .data has this call")
    config: Any = import_module("torch._functorch.config")
    with keeping_saved_tensors():
        expect(config.donated_buffer, False, "whether saved tensors are reused")
