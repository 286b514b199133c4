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
Rule 3: nothing of the engine is traced: Dynamo skips its files but for inlined.py, and starts no graph there.
        A skipped frame is eager code like any other.
Rule 4: given tensors are plain: Dynamo never sees the classes of full tensors.
Rule 5: without torch.compile a region costs one call.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from retrograde.compiling import inlined
from retrograde.compiling.inlined import GIVEN, Forward
from retrograde.layout import UnitSpec
from retrograde.residency import MADE, Leaf, SavedTensors, specialize

_REASON = (
    "retrograde pages parameters in between compiled graphs, one unit at a time, so no graph spans units; with "
    "fullgraph=True use retrograde.compile(model, fullgraph=True), which compiles each unit as one graph"
)

_compiling_frames = torch._C._dynamo.eval_frame.get_eval_frame_callback

REGION = "_retrograde_region"


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
        before = [member.__dict__.get(GIVEN) for member, _ in self.members]
        try:
            self._give()
            return (self.compiled or self.plain)(module, *args, **kwargs)
        finally:
            for (member, _), given in zip(self.members, before, strict=True):
                member.__dict__[GIVEN] = given
            if hooked:
                self._saved.leave()

    def _give(self) -> None:
        fulls = {(member, name): getattr(member, name) for member, names in self.members for name in names}
        trained = [key for key, full in fulls.items() if full.requires_grad]
        aliases = dict(zip(trained, _Enter.apply(*[fulls[key] for key in trained]), strict=True))  # type: ignore[no-untyped-call]
        for member, names in self.members:
            given = {name: aliases.get((member, name), _plain(fulls[member, name])) for name in names}
            for alias in given.values():
                torch._dynamo.mark_static(alias)  # parameters keep their sizes
            member.__dict__[GIVEN] = given


class _Enter(torch.autograd.Function):
    """Full tensors as AOTAutograd takes them: plain, and no views of anything."""

    @staticmethod
    def forward(ctx: Any, *fulls: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([_plain(full) for full in fulls])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


def _plain(full: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, no graph, no class of ours."""
    return torch.Tensor._make_subclass(torch.Tensor, full)


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


def mark_regions(model: nn.Module, specs: Sequence[UnitSpec], saved: SavedTensors) -> None:
    """Make regions of `model`'s modules; again after parameters were added."""
    _hide_from_dynamo()
    before = [module for module in model.modules() if REGION in module.__dict__]
    regions = set(find(model, [*(spec.module for spec in specs), *before]))
    for module in model.modules():
        if module in regions or module is model:
            if module in regions and REGION not in module.__dict__:
                module.__dict__[REGION] = Region(saved, _compilable(module))
            _layer(module, _boundary)
        elif any(isinstance(leaf, Leaf) for leaf in module._parameters.values()):
            _layer(module, inlined.transparent)
    for module in regions:
        module.__dict__[REGION].members = list(_members(module, regions - {module}))


def regions_of(model: nn.Module) -> dict[str, Region]:
    """By module name."""
    return {name: module.__dict__[REGION] for name, module in model.named_modules() if REGION in module.__dict__}


_LAYER = "_retrograde_layer"


def _layer(module: nn.Module, forward: Any) -> None:
    """Put what Dynamo is to see on top of what `patch` made of the module, unless it is there."""
    cls = type(module)
    if _LAYER not in vars(cls):
        names = [name for name, leaf in module._parameters.items() if isinstance(leaf, Leaf)]
        body: dict[str, Any] = {name: inlined.given_or(name, getattr(cls, name)) for name in names}
        body |= {"forward": forward(cls.forward, _original(cls).forward), GIVEN: None, _LAYER: True}
        specialize(module, body, _LAYER, forward)


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    """The class the user gave the module."""
    return next(each for each in cls.__mro__ if MADE not in vars(each))


def _members(module: nn.Module, others: set[nn.Module]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    if names := tuple(name for name, leaf in module._parameters.items() if isinstance(leaf, Leaf)):
        yield module, names
    for child in module.children():
        if child not in others:
            yield from _members(child, others)


def _compilable(module: nn.Module) -> Forward:
    cls = _original(type(module))
    if cls.forward.__module__.split(".")[0] == "torch":
        return _own_frame(cls, tuple(leaf.slot.shape for leaf in module.parameters() if isinstance(leaf, Leaf)))
    return cls.forward


@functools.cache
def _own_frame(cls: type[nn.Module], shapes: tuple[torch.Size, ...]) -> Forward:
    """One for modules of the same sizes: they share graphs, and others do not count as their recompilations."""
    return inlined.own_frame(cls)


def _boundary(base: Forward, plain: Forward) -> Forward:
    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        region: Region | None = self.__dict__.get(REGION)
        if region is None or not region.active:
            return base(self, *args, **kwargs)
        return region.run(self, args, kwargs)

    # Dynamo does not inline it, but may compile what it calls: `torch.compiler.disable` without a wrapper.
    marked: Any = forward
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    return forward


@functools.cache
def _hide_from_dynamo() -> None:
    """Rule 3."""
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import skip_code

    for name, module in list(sys.modules.items()):
        if name.startswith("retrograde.") and module is not inlined and "__path__" not in vars(module):
            trace_rules.add(name)
    for code in inlined.all_code():
        skip_code(code)
