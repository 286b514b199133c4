"""Regions: the parts of a model that torch.compile turns into graphs, and how parameters enter them.

[Note: regions]
Paging is not something Dynamo can trace, and a graph over several units would hold all their pages. So a compiled
graph never spans units. A *region* is a unit's module, or a largest module outside any unit that contains none.
Its forward is a boundary: it runs eagerly, pages in, makes the full tensors available to its modules as *given*
tensors, and calls what may be compiled. Under Dynamo, `module.weight` is the given tensor, which makes it an input
of the graph.

Rule 1: what a graph saves of its inputs passes the saved-tensor hooks that are active around the region, so it
        becomes handles (pages/saved_tensors.py): the page may go after forward, and the graph's backward pages it
        in again.
Rule 2: a weight that is read where it is not given ends the graph there, and is read eagerly.
Rule 3: Dynamo traces nothing of the engine: it skips retrograde's files but those called inlined.py, and starts no
        graph in these. A skipped frame is eager code like any other.
Rule 4: given tensors are plain: Dynamo never sees the classes of full tensors.
Rule 5: a graph may edit given tensors, which share memory and version counter with the page's: the edit is written
        back before anything is saved, and when the region ends. Where the page is the shard's own memory, ranks meet
        before such a graph runs (backend.py).
Rule 6: without torch.compile a region costs one call.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograde.compiling import inlined
from retrograde.compiling.backend import Keeping, Services
from retrograde.compiling.inlined import GIVEN, KEY, Forward
from retrograde.layout import UnitSpec
from retrograde.parameters import ShardedParameter, classes_of_sharded_tensors
from retrograde.parameters.access import leaves, original_class, specialize
from retrograde.torch_internals import (
    backend_of,
    compiling_frames,
    dynamo_is_loaded,
    ending_graphs,
    hide_from_dynamo,
    in_transform,
    is_untraced,
    keep_sizes,
    make_subclass,
    node_class,
)

_PARTLY_TRACED = ("retrograde.compiling", "retrograde.pipeline")  # rooms with an inlined.py

_REASON = (
    "retrograde pages parameters in between compiled graphs, one unit at a time, so no graph spans units; with "
    "fullgraph=True use retrograde.compile(model, fullgraph=True), which compiles each unit as one graph"
)

REGION = "_retrograde_region"


class Member(NamedTuple):
    """A module of a region that has parameters of its own."""

    module: nn.Module
    leaves: dict[str, ShardedParameter]


class Region:
    """A region of the model. `retrograde.compile()` sets `compiled`; in an outer torch.compile, its backend is used."""

    def __init__(self, services: Services, plain: Forward) -> None:
        self.services = services
        self.plain = plain
        self._disabled = is_untraced(plain)  # the user has disabled it; torch.compile would overrule that
        self.members: list[Member] = []
        self.compiled: Forward | None = None
        self._outer: tuple[Any, Forward] = (None, plain)  # the last backend, and `plain` compiled with it

    @property
    def forward(self) -> Forward | None:
        """The compiled forward to run; None if nobody compiles this region. Under torch.func a region is eager code."""
        if self._disabled or in_transform():
            return None
        if self.compiled is not None:
            return self.compiled
        frames = compiling_frames()
        if frames is None:
            return None
        backend = backend_of(frames)
        if self._outer[0] is not backend:
            self._outer = backend, torch.compile(self.plain, backend=Keeping(backend, self.services))
        return self._outer[1]

    def run(self, forward: Forward, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.services.grow()
        saved = self.services.saved
        hooked = saved.enter()
        before = saved.compiled, [member.module.__dict__.get(GIVEN) for member in self.members]
        try:
            self._give()
            saved.compiled = True
            result = forward(module, *args, **kwargs)
            self._publish_edits()
            return result
        finally:
            saved.compiled = before[0]
            for member, given in zip(self.members, before[1], strict=True):
                member.module.__dict__[GIVEN] = given
            if hooked:
                saved.leave()

    def _give(self) -> None:
        fulls = {(m.module, name): getattr(m.module, name) for m in self.members for name in m.leaves}
        trained = [key for key, full in fulls.items() if full.requires_grad]
        aliases = dict(zip(trained, _Enter.apply(*[fulls[key] for key in trained]), strict=True))  # type: ignore[no-untyped-call]
        aliases |= {key: _plain(full) for key, full in fulls.items() if key not in aliases}
        for module, own in self.members:
            given = {name: aliases[module, name] for name in own}
            for name, alias in given.items():
                keep_sizes(alias)
                setattr(alias, KEY, getattr(own[name], KEY, None))
            module.__dict__[GIVEN] = given

    def _publish_edits(self) -> None:
        """Write back edits after which the graph has saved nothing (Rule 5)."""
        for module, own in self.members:
            for name, alias in module.__dict__[GIVEN].items():
                if alias.grad_fn is not None and type(alias.grad_fn) is not node_class(_Enter):
                    raise RuntimeError(
                        f"parameter {own[name].slot.name} requires grad and is used in an in-place operation in a "
                        f"compiled forward, or edited there through .data; edit weights under torch.no_grad()"
                    )
        for unit in {leaf.unit: None for member in self.members for leaf in member.leaves.values()}:
            unit.write_back_edits()


class _Enter(torch.autograd.Function):
    """Makes given tensors of full tensors, as AOTAutograd takes them: plain, and no views."""

    @staticmethod
    def forward(ctx: Any, *fulls: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([_plain(full) for full in fulls])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


def _plain(full: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the same memory and version counter, in no graph."""
    return make_subclass(torch.Tensor, full)


def find(model: nn.Module, units: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Find the modules of a model that are to be regions."""
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


def mark_regions(model: nn.Module, specs: Sequence[UnitSpec], services: Services) -> None:
    """Make regions of `model`'s modules. It is called again when parameters were added."""
    hide()
    before = [module for module in model.modules() if REGION in module.__dict__]
    regions = set(find(model, [*(module for spec in specs for module in spec.modules), *before]))
    for module in model.modules():
        if module in regions or module is model:
            if module in regions and REGION not in module.__dict__:
                module.__dict__[REGION] = Region(services, _compilable(module))
            _layer(module, _boundary)
        elif leaves(module):
            _layer(module, inlined.transparent)
    for module in regions:
        module.__dict__[REGION].members = list(_members(module, regions - {module}))


def regions_of(model: nn.Module) -> dict[str, Region]:
    """The regions of a model, by module name."""
    return {name: module.__dict__[REGION] for name, module in model.named_modules() if REGION in module.__dict__}


_LAYER = "_retrograde_layer"  # the forward of a class of ours


def _layer(module: nn.Module, forward: Any) -> None:
    """Give the module a subclass with the properties and the forward that Dynamo is to see, unless it has one."""
    cls = type(module)
    if _LAYER not in vars(cls):
        body: dict[str, Any] = {name: inlined.given_or(name, getattr(cls, name)) for name in leaves(module)}
        body |= {"forward": forward(cls.forward, original_class(cls).forward), GIVEN: None, _LAYER: forward}
        specialize(module, body, _LAYER, forward)


@contextlib.contextmanager
def without_regions(model: nn.Module) -> Iterator[None]:
    """Take regions away from modules for a while, so that they can be copied: a copy gets regions of its own."""
    taken = {module: module.__dict__.pop(REGION) for module in model.modules() if REGION in module.__dict__}
    try:
        yield
    finally:
        for module, region in taken.items():
            module.__dict__[REGION] = region


def _members(module: nn.Module, others: set[nn.Module]) -> Iterator[Member]:
    if own := leaves(module):
        yield Member(module, own)
    for child in module.children():
        if child not in others:
            yield from _members(child, others)


def _compilable(module: nn.Module) -> Forward:
    cls = original_class(type(module))
    if cls.forward.__module__.split(".")[0] == "torch":
        # One function for modules of the same sizes: they share graphs, and others are not recompilations of it.
        shapes = [leaf.slot.shape for leaf in module.parameters() if isinstance(leaf, ShardedParameter)]
        return _frames.setdefault((cls, *shapes), inlined.own_frame(cls))
    return cls.forward


_frames: dict[Any, Forward] = {}


def _boundary(base: Forward, plain: Forward) -> Forward:
    """The forward of a region, or of the model. As with `torch.compiler.disable`, Dynamo may compile what it calls."""

    @functools.wraps(base)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hide()
        region: Region | None = self.__dict__.get(REGION)
        if region is None or (compiled := region.forward) is None:
            return base(self, *args, **kwargs)
        return region.run(compiled, self, args, kwargs)

    return ending_graphs(_REASON)(forward)


def hide() -> None:
    """Once Dynamo is loaded, hide files from it (Rule 3). To load it for this would take longer than all the rest."""
    if dynamo_is_loaded():
        _hide_from_dynamo()


@functools.cache
def _hide_from_dynamo() -> None:
    hidden = []
    for name in list(sys.modules):
        opened = name.startswith(_PARTLY_TRACED)
        room = name.count(".") == 1  # a room; others than these two are hidden as a whole, since hiding is slow
        if name.startswith("retrograde.") and not name.endswith(".inlined") and room != opened:
            hidden.append(name)
    hide_from_dynamo(hidden, inlined.all_code(inlined), classes_of_sharded_tensors())
