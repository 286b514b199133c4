"""Regions: the parts of a model that torch.compile turns into graphs, and how parameters enter them.

[Note: regions]
Paging is not something Dynamo can trace, and a graph over several units would hold all their pages. So a compiled
graph never spans units. A *region* is a unit's module, or a largest module outside any unit that contains none.
Its forward is a boundary: it runs eagerly, pages in, makes the full tensors available to its modules as *given*
tensors, and calls what may be compiled. Under Dynamo, `module.weight` is the given tensor, which makes it an input
of the graph.

Rule 1: what a graph saves of its inputs passes the saved-tensor hooks that are active around the region, so it
        becomes handles (residency/saved.py): the page may go after forward, and the graph's backward pages it in again.
Rule 2: a weight that is read where it is not given ends the graph there, and is read eagerly.
Rule 3: nothing of the engine is traced: Dynamo skips its files, and starts no graph in what modules are given
        (residency/access.py). A skipped frame is eager code like any other.
Rule 4: without torch.compile a region costs one call.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from retrograde.residency import access
from retrograde.residency.saved import SavedTensors

_REASON = (
    "retrograde pages parameters in between compiled graphs, one unit at a time, so no graph spans units; with "
    "fullgraph=True use retrograde.compile(model, fullgraph=True), which compiles each unit as one graph"
)

_compiling_frames = torch._C._dynamo.eval_frame.get_eval_frame_callback

REGION = "_retrograde_region"
Forward = Callable[..., Any]


class Region:
    """One boundary. `compiled` is set by `retrograde.compile()`; else an outer torch.compile compiles `plain`."""

    def __init__(self, saved: SavedTensors, plain: Forward) -> None:
        self._saved, self.plain = saved, plain
        self.members: list[tuple[nn.Module, tuple[str, ...]]] = []
        self.compiled: Forward | None = None

    @property
    def active(self) -> bool:
        """Is there something to compile for? Under torch.func a region is eager code."""
        compiling = self.compiled is not None or _compiling_frames() is not None
        return compiling and torch._C._functorch.peek_interpreter_stack() is None

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hooked = self._saved.enter()
        before = [member.__dict__.get(access.GIVEN) for member, _ in self.members]
        try:
            self._give()
            return (self.compiled or self.plain)(module, *args, **kwargs)
        finally:
            for (member, _), given in zip(self.members, before, strict=True):
                member.__dict__[access.GIVEN] = given
            if hooked:
                self._saved.leave()

    def _give(self) -> None:
        fulls = {(member, name): getattr(member, name) for member, names in self.members for name in names}
        trained = [key for key, full in fulls.items() if full.requires_grad]
        aliases = dict(zip(trained, _Enter.apply(*[fulls[key] for key in trained]), strict=True))  # type: ignore[no-untyped-call]
        for member, names in self.members:
            given = {name: aliases.get((member, name), fulls[member, name].detach()) for name in names}
            for alias in given.values():
                torch._dynamo.mark_static(alias)  # parameters keep their sizes
            member.__dict__[access.GIVEN] = given


class _Enter(torch.autograd.Function):
    """Full tensors as AOTAutograd takes them: plain, and no views of anything."""

    @staticmethod
    def forward(ctx: Any, *fulls: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([full.detach() for full in fulls])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


def find(model: nn.Module, units: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The modules that are regions."""
    chosen = set(units) - {model}

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in chosen or not any(inner in chosen for inner in module.modules()):
            if any(True for _ in module.parameters()):
                yield module
            inside = [inner for inner in module.modules() if inner in chosen and inner is not module]
            yield from (found for inner in inside for found in walk(inner))
        else:
            yield from (found for child in module.children() for found in walk(child))

    yield from dict.fromkeys(walk(model))


def mark_regions(model: nn.Module, units: Sequence[nn.Module], engine: access.Patched) -> None:
    """Make regions of `model`'s modules; again after parameters were added."""
    _hide_from_dynamo()
    modules = list(find(model, units))
    for module in modules:
        region = module.__dict__.get(REGION)
        if region is None:
            region = module.__dict__[REGION] = Region(engine.saved, _compilable(access.original(module)))
            access.specialize(module, ("region",), {"forward": _boundary(type(module))}, engine)
        region.members = list(_members(module, set(modules) - {module}))


def regions_of(model: nn.Module) -> dict[str, Region]:
    """By module name."""
    return {name: module.__dict__[REGION] for name, module in model.named_modules() if REGION in module.__dict__}


def _members(module: nn.Module, others: set[nn.Module]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    if names := tuple(name for name, leaf in module._parameters.items() if leaf is not None):
        yield module, names
    for child in module.children():
        if child not in others:
            yield from _members(child, others)


def _compilable(cls: type[nn.Module]) -> Forward:
    if cls.forward.__module__.split(".")[0] == "torch":
        return access.own_frame(cls)
    return cls.forward


def _boundary(cls: type[nn.Module]) -> Forward:
    base = cls.forward

    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        region: Region = self.__dict__[REGION]
        return region.run(self, args, kwargs) if region.active else base(self, *args, **kwargs)

    return access.closed(forward, _REASON)


@functools.cache
def _hide_from_dynamo() -> None:
    """Rule 3. What is in access.py must still be traced as part of a region."""
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import skip_code

    for name, module in list(sys.modules.items()):
        if name.startswith("retrograde.") and module is not access and "__path__" not in vars(module):
            trace_rules.add(name)
    for code in access.all_code():
        skip_code(code)
