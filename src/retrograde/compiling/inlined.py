"""The code of sharded modules that Dynamo may trace: how parameters and forwards look inside a compiled graph.

Dynamo skips all other code of retrograde but pipeline/inlined.py (regions.py, Rule 3). No graph starts here: these
functions are only inlined into graphs of the user's code.
"""

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from retrograde.torch_internals import compiler

Forward = Callable[..., Any]

GIVEN = "_retrograde_given"  # attribute with a module's given tensors, while its region runs
KEY = "_retrograde_key"  # attribute with a parameter's number in a tensor, by which a pipeline's graphs know it
_NOT_GIVEN = (
    "a sharded parameter is read outside the forward of its unit: it is paged in eagerly, and the graph ends here"
)
_tracing = torch.compiler.is_dynamo_compiling


def given_or(name: str, eager: property) -> property:
    """The property for a parameter of a module: in a graph it returns the given tensor, elsewhere what `eager` does."""
    read = eager.fget
    assert read is not None

    def get(self: nn.Module) -> Any:
        if _tracing():
            given: Any = self._retrograde_given
            if given is not None and name in given:
                return given[name]
            compiler.end_graph_here(msg=_NOT_GIVEN)
        return read(self)

    return property(get, eager.fset, eager.fdel)


def transparent(eager: Forward, plain: Forward) -> Forward:
    """A forward that in a graph runs the user's own: the saved-tensor hooks are active around the region already."""

    @functools.wraps(eager)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if _tracing() else eager(self, *args, **kwargs)

    return forward


def own_frame(cls: type[nn.Module]) -> Forward:
    """Wrap `cls.forward` in a function with code of its own, since Dynamo starts no graph in torch's files, and counts
    recompilations by code."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_of_{cls.__name__}")
    return forward


def all_code(module: ModuleType) -> Iterator[CodeType]:
    """All code of a module, so that no graph starts there. (Functions of `own_frame` have copies of its code.)"""

    def nested(code: CodeType) -> Iterator[CodeType]:
        yield code
        for item in code.co_consts:
            if isinstance(item, CodeType):
                yield from nested(item)

    for item in vars(module).values():
        if getattr(item, "__module__", None) == module.__name__:
            for function in vars(item).values() if isinstance(item, type) else [item]:
                plain = getattr(function, "__func__", function)
                if isinstance(plain, FunctionType):
                    yield from nested(plain.__code__)
