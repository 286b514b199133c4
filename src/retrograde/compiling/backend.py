"""The backend that compiles regions: the one that the user has chosen, inside `Keeping`."""

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
    """A backend around the user's, which does three things more. It keeps what a graph has saved, so that a second
    backward finds it. It reads `w.detach()` in place of `w.data`, whose version counter is another than that of `w`, so
    that every edit of a weight is noticed. And it has ranks meet before a graph that edits weights.

    Where pages stay, the shard is part of the page, so other ranks must have read it before the graph writes. (Where
    they do not stay, an edit is written back afterwards.) Eager edits are reported one by one (pages/full_tensor.py).
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
    """The inputs, by number, that a graph changes in place."""
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
    """The name of a node's function, as the method is called (`__iadd__` for `operator.iadd`)."""
    target = getattr(node, "target", "")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"__{name}__" if getattr(target, "__module__", "") == "_operator" else name
