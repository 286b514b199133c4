"""The backend that compiles regions: the one that was asked for, with two things seen to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config

Graph = Callable[..., Any]

_data_of: Any = vars(torch._C._autograd)["_get_data_attr"]


@dataclass(frozen=True)
class Keeping:
    """Leaves what was saved as it is, so that a second backward finds it, and sees every edit of a weight: `w.data`
    has a version counter of its own, `w.detach()` shares that of `w`."""

    inner: Graph

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Graph:
        for node in graph.graph.nodes:
            if node.target is _data_of:
                node.target = torch.Tensor.detach
        graph.recompile()
        with torch._functorch.config.patch(donated_buffer=False):
            return self.inner(graph, inputs)  # type: ignore[no-any-return]
