"""What Dynamo may trace of the project: how a module's parameters and forward look inside a compiled graph.

Everything else of the project is skipped by Dynamo (regions.py, Rule 3), and no graph starts here: these functions
are only ever inlined into a graph of the user's code.
"""

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from retrograde.torch_internals import compiler

Forward = Callable[..., Any]

GIVEN = "_retrograde_given"  # what a module's parameters are while its region runs
KEY = "_retrograde_key"  # a number in a tensor, by which graphs know a parameter of a pipeline, and its given tensor
_NOT_GIVEN = (
    "a sharded parameter is read outside the forward of its unit: it is paged in eagerly, and the graph ends here"
)
_tracing = torch.compiler.is_dynamo_compiling


def given_or(name: str, eager: property) -> property:
    """Parameter `name` of a module: the given tensor in a graph, else what it is eagerly."""
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
    """A forward that is the user's own in a graph: the saved-tensor hooks are around the region already."""

    @functools.wraps(eager)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if _tracing() else eager(self, *args, **kwargs)

    return forward


def own_frame(cls: type[nn.Module]) -> Forward:
    """`cls.forward` behind a function with code of its own: Dynamo starts no graph in torch's files, and it counts
    recompilations by code."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_of_{cls.__name__}")
    return forward


def all_code(module: ModuleType) -> Iterator[CodeType]:
    """Where no graph is to start: the code of such a module. What `own_frame` makes is a copy, and not among it."""

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
