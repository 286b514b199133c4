"""Tensors: their attributes without what a subclass makes of them, subclasses, and what torch's functions do."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch

from retrograde.torch_internals.constructors import CONSTRUCTORS
from retrograde.torch_internals.memory import storage_id, version_of
from retrograde.torch_internals.probes import expect, find, probe, tiny

# ---- attributes, whatever a subclass defines
set_data: Callable[[torch.Tensor, torch.Tensor], None] = find("torch:Tensor.data.__set__")
"""Give a tensor other memory; its place in graphs, its version counter and who refers to it stay."""
get_requires_grad: Callable[[torch.Tensor], bool] = find("torch:Tensor.requires_grad.__get__")
set_requires_grad: Callable[[torch.Tensor, bool], None] = find("torch:Tensor.requires_grad.__set__")
raw_grad: Callable[[torch.Tensor], torch.Tensor | None] = find("torch:Tensor.grad.__get__")
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = find("torch:Tensor.grad.__set__")


@probe(
    "other memory for a tensor",
    "set_data",
    needed_for="full tensors that are permanent while pages come and go",
    otherwise="module.weight leaves the graph when its page is dropped; parameters get no gradients",
)
def _memory_can_be_replaced() -> None:
    """Assumes: setting `data` changes a tensor's memory and shape, and leaves its node, its counter and its class."""
    result = tiny(requires_grad=True) * 2
    node, version = result.grad_fn, version_of(result)
    memory = tiny(3)
    set_data(result, memory)
    expect(storage_id(result) == storage_id(memory) and list(result.shape), [3], "the shape in the new memory")
    expect(result.grad_fn is node, True, "whether the node stayed")
    expect(version_of(result), version, "the version counter")


def forget_accumulator(leaf: torch.Tensor) -> None:
    """Have later graphs use another node for this leaf than graphs made so far. The leaf loses its memory."""
    other = torch.float16 if leaf.dtype != torch.float16 else torch.float32
    set_data(leaf, torch.empty(0, dtype=other, device=leaf.device))


@probe(
    "a new node for a leaf",
    "forget_accumulator",
    needed_for="refusing backwards through graphs that were recorded before shard()",
    otherwise="a backward after shard() is refused though its graph was recorded after it",
)
def _accumulators_can_be_renewed() -> None:
    """Assumes: a leaf whose data gets another dtype lets go of the node that accumulates its gradient."""
    leaf = tiny(requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge
    old = edge(leaf).node
    expect(edge(leaf).node is old, True, "whether a leaf keeps its node")
    forget_accumulator(leaf)
    set_data(leaf, tiny())
    expect(edge(leaf).node is old, False, "whether the node is the same after another dtype")


@probe(
    "attributes behind a subclass",
    "get_requires_grad",
    "set_requires_grad",
    "raw_grad",
    "set_raw_grad",
    needed_for="p.grad and p.requires_grad of sharded parameters, which do more than torch's own",
    otherwise="reading p.grad waits for other ranks where it must not, or calls itself without end",
)
def _attributes_are_descriptors() -> None:
    """Assumes: `grad` and `requires_grad` are descriptors of torch.Tensor that also serve a subclass with its own."""

    class ProbedLeaf(torch.Tensor):
        grad = property(lambda self: "own")
        requires_grad = property(lambda self: "own")

    leaf = make_subclass(ProbedLeaf, tiny())
    set_requires_grad(leaf, True)
    expect(get_requires_grad(leaf), True, "requires_grad after it was set")
    grad = tiny()
    expect(raw_grad(leaf), None, "the gradient of a new leaf")
    set_raw_grad(leaf, grad)
    expect(raw_grad(leaf) is grad, True, "whether the gradient is what was set")


# ---- subclasses
T = TypeVar("T", bound=torch.Tensor)
make_subclass: Callable[[type[T], torch.Tensor], T] = find("torch:Tensor._make_subclass")
"""A tensor of this class on the same memory and version counter, in no graph."""


@probe(
    "tensors of a class of ours",
    "make_subclass",
    needed_for="what module.weight returns, and the plain tensors that compiled graphs get for it",
    otherwise="edits of module.weight do not reach the parameter",
)
def _subclasses_share_memory() -> None:
    """Assumes: `_make_subclass` makes a tensor of a class on the same memory and version counter, without a graph."""

    class Ours(torch.Tensor):
        pass

    source = tiny(requires_grad=True) * 2
    made = make_subclass(Ours, source)
    expect(type(made) is Ours and made.grad_fn is None, True, "whether it is of the class, without a graph,")
    expect(storage_id(made) == storage_id(source), True, "whether it has the same memory")
    before = version_of(source)
    made.add_(1)
    expect(version_of(source) - before, 1, "how far the counter has moved with a write through it")


# ---- torch functions
without_torch_function: Callable[[], AbstractContextManager[Any]] = find("torch._C:DisableTorchFunctionSubclass")
"""Inside, classes of tensors are not asked (`__torch_function__`); modes are."""
with_torch_function: Callable[[], AbstractContextManager[Any]] = find("torch._C:_EnableTorchFunction")
"""Inside, they are asked again, whoever switched it off."""
without_modes_or_torch_function: Callable[[], AbstractContextManager[Any]] = find("torch._C:DisableTorchFunction")
"""Inside, neither classes of tensors nor modes are asked."""
NO_TORCH_FUNCTION: Any = find("torch._C:_disabled_torch_function_impl")
"""The `__torch_function__` of a class whose operations give plain tensors."""


@probe(
    "switches of torch functions",
    "without_torch_function",
    "with_torch_function",
    "without_modes_or_torch_function",
    needed_for="computing with a rank's piece of a parameter as a plain tensor, and hooks that see a piece",
    otherwise="an operation on a parameter calls itself without end, or takes a piece for the whole",
)
def _torch_functions_can_be_switched() -> None:
    """Assumes: torch has contexts that switch `__torch_function__` of tensors off, with and without modes, and on."""

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "asked"

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "mode"

    tensor, plain = make_subclass(Asked, tiny()), tiny()
    expect(torch.neg(tensor), "asked", "what a class of tensors is asked")
    with without_torch_function():
        expect(torch.neg(tensor).tolist(), [-1.0, -1.0], "what is computed where it is switched off")
        with with_torch_function():
            expect(torch.neg(tensor), "asked", "what it is asked where it is switched on again")
        with Mode():
            expect(torch.neg(plain), "mode", "what a mode is asked where classes are switched off")
    with Mode(), without_modes_or_torch_function():
        expect(torch.neg(plain).tolist(), [-1.0, -1.0], "what is computed where modes are switched off")


@probe(
    "a class without torch functions",
    "NO_TORCH_FUNCTION",
    needed_for="module.weight, whose operations give plain tensors at plain speed",
    otherwise="all activations are of retrograde's own class",
)
def _torch_functions_can_be_absent() -> None:
    """Assumes: a class with `_disabled_torch_function_impl` gives plain tensors."""

    class Quiet(torch.Tensor):
        __torch_function__ = NO_TORCH_FUNCTION

    expect(type(make_subclass(Quiet, tiny()) * 2) is torch.Tensor, True, "whether the result is plain")


# ---- hooks of leaves
def has_hooks(tensor: torch.Tensor) -> bool:
    """Has the tensor hooks, for its gradient or after accumulation?"""
    return bool(tensor._post_accumulate_grad_hooks or tensor._backward_hooks)


def take_hooks(leaf: torch.Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """Take a leaf's tables of hooks, for before and after accumulation, from it. Handles still remove hooks in them."""
    before: Any = leaf._backward_hooks
    after: Any = leaf._post_accumulate_grad_hooks
    leaf._backward_hooks = None
    leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    return before, after


def give_hooks(leaf: torch.Tensor, before: dict[int, Any] | None, after: dict[int, Any] | None) -> None:
    """Give a leaf tables of hooks that were taken from another leaf, or from it before it became another tensor."""
    leaf._backward_hooks = before
    leaf._post_accumulate_grad_hooks = after  # type: ignore[assignment]


@probe(
    "hooks of a leaf",
    "has_hooks",
    "take_hooks",
    "give_hooks",
    needed_for="hooks of parameters, registered before or after shard()",
    otherwise="hooks run with this rank's gradient before it is reduced, or not at all",
)
def _hooks_are_in_tables() -> None:
    """Assumes: a leaf has its hooks in two tables, from which handles remove them, and can be given others."""
    leaf = tiny(requires_grad=True)
    expect(has_hooks(leaf), False, "whether a new leaf has hooks")
    handle = leaf.register_hook(print)
    expect(has_hooks(leaf), True, "whether a leaf with a hook has hooks")
    leaf.register_post_accumulate_grad_hook(print)
    before, after = take_hooks(leaf)
    expect([len(table or ()) for table in (before, after)], [1, 1], "how many hooks its tables have")
    expect(has_hooks(leaf), False, "whether a leaf has hooks when its tables were taken")
    give_hooks(leaf, before, after)
    expect(has_hooks(leaf), True, "whether a leaf has hooks when its tables were given back")
    handle.remove()
    expect(len(before or ()), 0, "how many hooks are left when a handle has removed one")


# ---- what torch's functions do
def overloads(name: str) -> list[Any]:
    """The overloads of torch's function of this name; none if it is written in Python."""
    return _overloads_of(getattr(torch.ops.aten, name, None))


def _overloads_of(packet: Any) -> list[Any]:
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]


def returns_of(overload: Any) -> list[Any]:
    """What a function returns, each with its `type` and its `alias_info`, as its schema says."""
    returned: list[Any] = overload._schema.returns
    return returned


class Written(NamedTuple):
    """Which arguments an operator writes to, as its schema says."""

    places: frozenset[int]  # by position; -1 for an argument by keyword only
    names: frozenset[str]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments among the given ones to which the operator writes."""
        placed = [each for place, each in enumerate(args) if place in self.places]
        return placed + [each for name, each in kwargs.items() if name in self.names]


@functools.cache
def written_unseen(func: Any) -> Written | None:
    """The arguments to which an operator writes, unless it writes only to the first one and its name says so (`mul_`).

    Such are custom operators (`mutates_args`), those with `out`, and those of fused optimizers. None for all others."""
    name = getattr(func, "__name__", "").partition(".")[0]
    known = [func] if isinstance(func, torch._ops.OpOverload) else _overloads_of(func)
    if not known and name.endswith("_"):
        known = overloads(name)
    places: set[int] = set()
    names: set[str] = set()
    for overload in known:
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                names.add(argument.name)
                places.add(-1 if argument.kwarg_only else place)
    in_place = name.endswith("_") and places == {0}
    return None if in_place or not names else Written(frozenset(places), frozenset(names))


@probe(
    "schemas of torch's functions",
    "overloads",
    "written_unseen",
    "returns_of",
    "overridable_functions",
    needed_for="knowing which functions of a parameter give views, and which can be computed from a rank's piece",
    otherwise="an edit of a view of module.weight is lost; a reduction of p.grad is this rank's own",
)
def _schemas_say_what_is_returned() -> None:
    """Assumes: torch.ops.aten has torch's functions with their overloads, whose schemas say what is a view and
    what is written to, and whose tags say what is pointwise."""
    view, product, total = overloads("transpose")[0], overloads("mul")[0], overloads("sum")[0]
    expect(returns_of(view)[0].alias_info.is_write, False, "whether transpose() writes to what it returns a view of")
    expect([returns_of(each)[0].alias_info for each in (product, total)], [None, None], "aliases of mul() and sum()")
    expect("Tensor" in str(returns_of(total)[0].type), True, "whether sum() returns a tensor")
    tags = [torch.Tag.pointwise in each.tags for each in (product, total)]
    expect(tags, [True, False], "whether mul() and sum() are pointwise")
    expect(overloads("no_such_function"), [], "what is known of a function that does not exist")
    operators = (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul.Tensor, torch.mul, torch.Tensor.mul_)
    expect([written_unseen(each) for each in operators], [None] * 4, "what is written to unseen by mul() and mul_()")
    written = written_unseen(torch.ops.aten.mul.out)
    expect(written and written.names, {"out"}, "what mul.out() writes to")
    fused = written_unseen(find("torch:_fused_sgd_"))
    expect(fused and fused.places, {0, 1, 2}, "the places of what a fused SGD writes to")
    expect({"mul", "norm"} < overridable_functions(), True, "whether classes are asked of both")


def overridable_functions() -> set[str]:
    """The names of torch's functions and methods that ask a tensor's class what they mean, or that we make ask."""
    found: dict[Any, list[Any]] = torch.overrides.get_overridable_functions()
    names = {getattr(function, "__name__", "") for functions in found.values() for function in functions}
    return names - {"", "__get__", "__set__", "__delete__"} | set(CONSTRUCTORS)


# ---- many tensors at once
norms_of: Callable[..., list[torch.Tensor]] = find("torch:_foreach_norm")
"""`norms_of(tensors, order, dtype=...)`: their norms, in one call."""


@probe(
    "norms of many tensors",
    "norms_of",
    needed_for="clipping at a cost near that of plain tensors",
    otherwise="gradient norms are computed in single precision, or one by one",
)
def _norms_are_computed_together() -> None:
    """Assumes: `torch._foreach_norm` computes in the dtype that is asked for, and gives 0 for a tensor without
    elements."""
    many = tiny(1000) * 0.1
    wide, nothing = norms_of([many, many[:0]], 2.0, dtype=torch.double)
    expect(float(wide), float(many.double().norm()), "the norm in double precision")
    expect(float(nothing), 0.0, "the norm of nothing")


# ---- transforms
_top_transform: Callable[[], Any] = find("torch._C._functorch:peek_interpreter_stack")
_outside: Callable[[], AbstractContextManager[Any]] = find(
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack"
)
_HERE = contextlib.nullcontext()
transform_depth: Callable[[], int] = find("torch._C._functorch:get_dynamic_layer_stack_depth")
"""How many transforms of torch.func are active. Dynamo knows the answer while it traces."""


def in_transform() -> bool:
    """Is this inside torch.func.grad, vmap or the like?"""
    return _top_transform() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """A context in which new tensors belong to no transform of torch.func."""
    return _HERE if _top_transform() is None else _outside()


@probe(
    "transforms of torch.func",
    "in_transform",
    "outside_transforms",
    "transform_depth",
    needed_for="torch.func.grad, vmap and functional_call over a sharded model, or in a pipeline's stage",
    otherwise="a page that is made inside a transform is lost when the transform ends",
)
def _transforms_can_be_left() -> None:
    """Assumes: torch says whether a transform is active and how many are, and can set them all aside for a while."""
    seen: list[bool] = []
    depths = [transform_depth()]
    plain = tiny()

    def transformed(row: torch.Tensor) -> torch.Tensor:
        seen.append(in_transform())
        depths.append(transform_depth())
        with outside_transforms():
            seen.append(in_transform())
            made = plain + 1
        seen.append(torch._C._functorch.is_functorch_wrapped_tensor(made))
        return row * 2

    expect(in_transform(), False, "whether a transform is active where none is")
    torch.func.vmap(transformed)(tiny())
    expect(seen, [True, False, False], "whether one is active inside, set aside, and in what was made then,")
    expect(depths, [0, 1], "how many are active outside and inside")
