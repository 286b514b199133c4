"""Dynamo, Inductor and AOTAutograd. Importing them takes seconds, so nothing here does before it is needed.

No function of this package may be called from code that Dynamo traces (compiling/inlined.py): Dynamo skips its files.
`end_graph_here` is not one: it is torch's own.
"""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import CodeType
from typing import Any

import torch

from retrograde.torch_internals.probes import When, expect, find, probe, tiny

Traceable = Callable[..., Any]

# ---- frames and graphs
_frame_callback: Callable[[], Any] = find("torch._C:_dynamo.eval_frame.get_eval_frame_callback")


def compiling_frames() -> Any | None:
    """The callback by which Dynamo compiles this thread's frames at the moment; None if it does not."""
    callback = _frame_callback()
    return callback if callable(callback) else None


def backend_of(frames: Any) -> Any:
    """The backend of a callback that `compiling_frames` has returned."""
    backend: Callable[..., Any] = import_module("torch._dynamo.eval_frame").innermost_backend
    return backend(frames)


def dynamo_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def __getattr__(name: str) -> Any:
    """Find `end_graph_here(msg=...)`, at which a traced graph ends. Dynamo is imported only then."""
    if name != "end_graph_here":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = import_module("torch._dynamo").graph_break
    return found


def traceable(source: str, **names: Any) -> Callable[..., torch.Tensor]:
    """Make the function `run` of this source, for probes. It is in no file, so that Dynamo has no rule for it."""
    exec(compile(source, "<a probe>", "exec"), names)
    run: Callable[..., torch.Tensor] = names["run"]
    return run


_THREE_PARTS = """
def run(tensor):
    look()
    doubled = tensor * 2
    compiler.end_graph_here(msg="a probe")
    return doubled + 1
"""


@probe(
    "frames that are compiled",
    "compiling_frames",
    "backend_of",
    "dynamo_is_loaded",
    "end_graph_here",
    needed_for="torch.compile(model): compiling each unit with the backend that was asked for",
    otherwise="units run eagerly inside a compiled model",
    when=When.DOCTOR,
)
def _frames_have_a_callback() -> None:
    """Assumes: torch knows the callback that compiles frames, from which the backend can be found; `graph_break` ends
    a graph with a reason."""
    expect(compiling_frames(), None, "what frames are compiled with, where they are not,")
    inside: list[Any] = []
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @ending_graphs("a probe")
    def look() -> None:
        inside.append(compiling_frames())

    hide_from_dynamo([], [look.__code__], [])
    run = traceable(_THREE_PARTS, look=look, compiler=sys.modules[__name__])
    result = torch.compile(run, backend=backend)(tiny())
    expect(result.tolist(), [3.0, 3.0], "what a compiled function computes")
    expect(len(graphs), 2, "the number of graphs, where one was ended,")
    graph = torch.fx.symbolic_trace(lambda tensor: tensor.neg())
    backend_of(inside[0])(graph, [tiny()])
    expect(graphs[-1] is graph, True, "whether the backend that compiles frames is the one that was asked for")
    expect(dynamo_is_loaded(), True, "whether Dynamo is loaded when it has run")


# ---- what is not traced
def ending_graphs(reason: str) -> Callable[[Traceable], Traceable]:
    """Mark a function as `torch.compiler.disable(recursive=False)` does, which would import Dynamo.

    Graphs end where it is called, with `reason` in Dynamo's messages. The functions that it calls may be compiled. (Its
    own code must be hidden as well.)"""

    def mark(function: Any) -> Traceable:
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
        marked: Traceable = function
        return marked

    return mark


def is_untraced(function: Callable[..., Any]) -> bool:
    """Was the function given to `torch.compiler.disable`, or to `ending_graphs`?"""
    return bool(getattr(function, "_torchdynamo_disable", False))


def hide_from_dynamo(modules: Iterable[str], code: Iterable[CodeType], classes: Iterable[type[torch.Tensor]]) -> None:
    """Have Dynamo run these modules eagerly, whole packages by their name, start no graph in this code, and end graphs
    where there is a tensor of these classes."""
    hide: Callable[[str], None] = import_module("torch._dynamo.trace_rules").add
    skip: Callable[[CodeType], None] = import_module("torch._dynamo.eval_frame").skip_code
    for name in modules:
        hide(name)
    for each in code:
        skip(each)
    untraced: set[type] = import_module("torch._dynamo.config").nontraceable_tensor_subclasses
    untraced.update(classes)


def keep_sizes(tensor: torch.Tensor) -> None:
    """Tell Dynamo that this tensor keeps its sizes, so that graphs may rely on them."""
    import_module("torch._dynamo").mark_static(tensor)


class _Untraced(torch.Tensor):
    """A class of tensors for a probe, which Dynamo does not trace."""


@probe(
    "what is not traced",
    "ending_graphs",
    "is_untraced",
    "hide_from_dynamo",
    "keep_sizes",
    needed_for="graphs that end at units: paging is not something Dynamo can trace",
    otherwise="torch.compile(model) fails inside retrograde, or compiles parts of it",
    when=When.DOCTOR,
)
def _some_code_is_not_traced() -> None:
    """Assumes: Dynamo ends graphs at functions with `_torchdynamo_disable`, as `torch.compiler.disable` marks them, and
    leaves alone modules that are added to its rules, code that it was told to skip, and tensors of classes in a set."""
    graphs: list[Any] = []
    traced: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @ending_graphs("a probe")
    def eager(tensor: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_dynamo_compiling())
        return tensor * 2

    calls = traceable("def run(tensor): return eager(tensor)", eager=eager)
    skipped = traceable("def run(tensor): return tensor * 2")
    disabled = torch.compiler.disable(lambda: None)  # type: ignore[no-untyped-call]
    expect(is_untraced(disabled), True, "whether torch marks functions in the same way")
    expect([is_untraced(eager), is_untraced(skipped)], [True, False], "which functions are marked")
    hide_from_dynamo([], [each.__code__ for each in (eager, skipped)], [])
    keep_sizes(tiny())
    for function in (calls, skipped):
        torch.compile(function, backend=backend)(tiny())
    expect([len(graphs), traced], [0, [False]], "the number of graphs of what is not to be traced")
    hide_from_dynamo([__package__], [], [_Untraced])  # as retrograde does itself
    torch.compile(traceable("def run(tensor): return tensor * 2"), backend=backend)(tiny().as_subclass(_Untraced))
    expect(len(graphs), 0, "the number of graphs with a tensor of a class that is hidden")
    rules: Any = import_module("torch._dynamo.trace_rules")
    expect(rules.check(tiny), True, "whether Dynamo skips a function of a module that is hidden")
