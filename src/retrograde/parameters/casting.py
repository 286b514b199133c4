"""Casts of modules' arguments and results to the dtypes that `Precision` gives them.

| module                       | its floating-point arguments become | its floating-point results become |
|------------------------------|-------------------------------------|-----------------------------------|
| the model itself             | `param`, unless `inputs=False`      | `output`, if it is given          |
| one of a class in `keep`     | the dtype of its masters            | `param`                           |

Everything else is the model's own affair, and buffers are never cast. These casts are part of the graph, as
`x.to(dtype)` in `forward` would be. A hook of the module sees what its caller gave and what its caller gets.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from retrograde.layout import Precision
from retrograde.torch_internals import tree_map_only

T = TypeVar("T")


class CastAround(NamedTuple):
    """The dtypes to which a module's arguments and results are cast; None casts nothing."""

    arguments: torch.dtype | None
    results: torch.dtype | None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def cast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = in_dtype((args, kwargs), self.arguments)
            return in_dtype(forward(module, *args, **kwargs), self.results)

        return cast


def in_dtype(tree: T, dtype: torch.dtype | None) -> T:
    """Cast every floating-point tensor in `tree`. A tensor that already has the dtype stays the same object."""
    if dtype is None:
        return tree
    cast: T = tree_map_only(torch.Tensor, lambda found: found.to(dtype) if found.is_floating_point() else found, tree)
    return cast


def cast_around(module: nn.Module, is_model: bool, precision: Precision) -> CastAround | None:
    if is_model:
        casts = CastAround(precision.page if precision.inputs else None, precision.result)
        return None if casts == (None, None) else casts
    if precision.page is None or not precision.keeps(module):
        return None
    kept = (param.dtype for param in module.parameters() if param.dtype.is_floating_point)
    return CastAround(next(kept, precision.dtypes(torch.float32).master), precision.page)
