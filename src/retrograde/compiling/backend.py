"""The backend that compiles regions: the one that was asked for, with three things seen to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from retrograde.pages import SavedTensors, edits, views
from retrograde.torch_internals import READS_DATA, keeping_saved_tensors

Graph = Callable[..., Any]


class Services(NamedTuple):
    """What compiled code needs of the engine."""

    saved: SavedTensors
    grow: Callable[[], None]  # shards parameters that have joined the model
    pass_fence: Callable[[str], None]  # waits until every rank has read what this one is about to edit


@dataclass(frozen=True)
class Keeping:
    """Leaves what was saved as it is, so that a second backward finds it; sees every edit of a weight: `w.data` has a
    version counter of its own, `w.detach()` shares that of `w`; and has ranks meet before a graph that edits weights.

    Where pages stay, the shard is part of the page, so other ranks must have read it before the graph writes. (Where
    they do not, an edit is written back afterwards.) Eager edits are reported one by one (pages/full_tensor.py).
    """

    inner: Graph
    services: Services

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Graph:
        for node in graph.graph.nodes:
            if node.target is READS_DATA:
                node.target = torch.Tensor.detach
        graph.recompile()
        edited = _edited_inputs(graph.graph)
        with keeping_saved_tensors():
            run = self.inner(graph, inputs)
        return self._after_a_fence(run, edited) if edited else run

    def _after_a_fence(self, run: Graph, edited: list[int]) -> Graph:
        def fenced(*args: Any) -> Any:
            for unit in {self.services.saved.unit_of(args[place]) for place in edited}:
                if unit is not None and unit.stays:
                    self.services.pass_fence(f"a compiled forward that edits weights of unit {unit.name}")
                    break
            return run(*args)

        return fenced


def _edited_inputs(graph: torch.fx.Graph) -> list[int]:
    """Which tensors given to a graph it changes in place."""
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    found = set()
    for node in graph.nodes:
        if node.op in ("call_method", "call_function"):
            for target in _targets(node):
                while target not in places and views(_name(target)) and target.args:
                    target = target.args[0]
                found.add(places.get(target, -1))
    return sorted(found - {-1})


def _targets(node: torch.fx.Node) -> list[Any]:
    written = node.kwargs.get("out")
    if written is None and node.args and edits(_name(node)):
        written = node.args[0]
    return [each for each in (written if isinstance(written, list | tuple) else [written]) if each is not None]


def _name(node: Any) -> str:
    """As its method would be called."""
    target = getattr(node, "target", "")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"__{name}__" if getattr(target, "__module__", "") == "_operator" else name
