"""One small function for each route: how torch's functions are served on sharded tensors."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from retrograde.errors import UnsupportedError
from retrograde.pages import Aliased, FullTensor, edits, views
from retrograde.parameters.copied_views import view_of_copy
from retrograde.parameters.part import Part, bring_gradients, parts_in
from retrograde.parameters.reductions import reduced, reduced_lists, unscaled
from retrograde.parameters.routes import Call, Route, route
from retrograde.parameters.wholes import whole, wholes
from retrograde.torch_internals import tree_map_only, without_torch_function, written_unseen


def serve(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Serve a torch function of a sharded tensor; `__torch_function__` calls this."""
    call = Call.of(func, args, kwargs)
    way = route(call)
    if way not in _OF_THE_OBJECT and any(part.stands_for_whole for part in call.parts):
        return on_held_pages(call)
    if way not in _ASKING_NOTHING:
        bring_gradients(call.parts, meet=way in _AT_OWN_PACE)
    return HANDLERS[way](call)


_OF_THE_OBJECT = {Route.MEMORY, Route.SHAPE}  # about the object itself: nothing depends on its elements
_ASKING_NOTHING = {Route.MEMORY, Route.SHAPE, Route.LIKE, Route.RESHAPED, Route.REFUSED, Route.GRADIENTS}
# Handlers of these routes meet no other rank themselves, so ranks meet before them if gradients have come.
_AT_OWN_PACE = {Route.ELEMENTS, Route.EDIT, Route.EDIT_WHOLE, Route.LISTS, Route.UNSCALED, Route.DRAWN}


_NUMBERS = ("alpha", "beta", "value")  # arguments that torch takes as numbers, also from tensors without dimensions


# ---- without other ranks
def on_held_pages(call: Call) -> Any:
    """Call the function on the full tensors of parameters that `Engine.full_params(leaves=True)` holds. If other
    arguments are sharded, the call is routed again for them."""
    args, kwargs = tree_map_only(Part, _held, (tuple(call.args), call.kwargs))
    if args and isinstance(args[0], FullTensor) and call.func is getattr(torch.Tensor, call.name, None):
        return getattr(args[0], call.name)(*args[1:], **kwargs)  # full tensors have edits and views of their own
    return call.func(*args, **kwargs)


def _held(part: Part) -> torch.Tensor:
    return part.shown() if part.stands_for_whole else part


def on_memory(call: Call) -> Any:
    with without_torch_function():
        return call.func(*call.args, **call.kwargs)


def of_shape(call: Call) -> Any:
    """Let torch answer for tensors without memory in the shape of the whole."""
    args = [arg.blank() if isinstance(arg, Part) else arg for arg in call.args]
    return call.func(*args, **call.kwargs)


def like(call: Call) -> Any:
    with without_torch_function():
        made = call.func(*call.args, **call.kwargs)
    return _derived(made, call.first, call.args)


def on_pieces(call: Call) -> Any:
    args, kwargs = _aligned(call, call.first)
    with without_torch_function():
        result = call.func(*args, **kwargs)
    return _derived(result, call.first, args)


def _derived(result: Any, source: Part, args: Sequence[Any]) -> Any:
    """Make results computed from pieces sharded. An argument that torch returned (`x.to(x.dtype)`) stays as it is."""
    if isinstance(result, tuple):
        return type(result)([_derived(each, source, args) for each in result])  # it may have names
    if not isinstance(result, torch.Tensor) or any(result is arg for arg in args):
        return result
    return source.derive(result)


def _aligned(call: Call, to: Part) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, cut as `to` is, for this rank's piece. What is cut otherwise is made whole first."""
    values = [*call.args, *call.kwargs.values()]
    foreign = [value for value in values if isinstance(value, Part) and not value.cut_like(to)]
    if foreign:
        full = dict(zip(map(id, foreign), wholes(foreign, call.name), strict=True))
        values = [full.get(id(value), value) for value in values]
    beside = [_beside(value, to) for value in values]
    count = len(call.args)
    args, kwargs = beside[:count], dict(zip(call.kwargs, beside[count:], strict=True))
    if "fill" in call.name:  # torch takes what it fills in as a number too
        return args, kwargs
    args = [_with_a_say(arg, to) for arg in args]
    return args, {name: arg if name in _NUMBERS else _with_a_say(arg, to) for name, arg in kwargs.items()}


def _beside(value: Any, part: Part) -> Any:
    """Of a plain tensor in the whole's shape, those elements that this rank has of `part`. Other values stay."""
    if isinstance(value, Part) or not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 1:
        return value.detach().reshape((1,) if value.dim() else ())  # for all elements, with its say in the dtype
    return part.cut(value.detach().expand(part.shape))


def _with_a_say(value: Any, part: Part) -> Any:
    """What has no dimensions has as much say in the dtype as a `part` without dimensions, but less than its piece,
    which has one: so it gets one too, where their dtypes differ."""
    if isinstance(value, Part) or not isinstance(value, torch.Tensor) or part.dim() or value.dim():
        return value
    return value if value.dtype is part.dtype else value.reshape(1)


def reshaped(call: Call) -> Any:
    """Return the same memory under another shape. torch raises its own error if the number of elements differs."""
    part = call.first
    rest = [arg.blank() if isinstance(arg, Part) else arg for arg in call.args[1:]]
    shape = call.func(part.blank(), *rest, **call.kwargs).shape
    with without_torch_function():
        return part.reshaped(part.detach(), shape)


def drawn(call: Call) -> Any:
    """Draw random numbers for the whole and keep this rank's piece, so that ranks with one seed draw one tensor."""
    part, rest = call.first, wholes(call.args[1:], call.name)
    with without_torch_function():
        blank = part.slot.full(torch.empty(part.slot.numel, dtype=part.dtype, device=part.device)).view(part.shape)
        blank.requires_grad_(part.requires_grad)  # torch may refuse to edit a leaf
        mine = _same_in_replicas(part, part.cut(call.func(blank, *rest, **call.kwargs).detach()))
    if not edits(call.name):
        return part.derive(mine.clone())
    with torch.no_grad(), _writing(call.name, [part]), without_torch_function():
        return part.copy_(mine)


def _same_in_replicas(part: Part, mine: torch.Tensor) -> torch.Tensor:
    """Take the first replica's numbers in every replica: their seeds may differ, and they hold the same elements."""
    grid = part.unit.grid
    if grid.replicas == 1:
        return mine
    everybodys = part.coordinator.values(f"random numbers for {part.slot.name}", mine.clone)
    return everybodys[grid.first_holder(grid.rank)]


# ---- on the full tensor
def on_wholes(call: Call) -> Any:
    """Serve a function on the full tensor. If it returns a view, a write to the view must reach the sharded tensor."""
    target = call.args[0]
    if not isinstance(target, Part) or not (views(call.name) or call.name in ("__get__", "__iter__")):
        return _with_wholes(call)
    if call.name == "__iter__":
        return iter(target.unbind(0))
    if target.of_weights:
        return _view_of_weights(call)
    if target.passing:
        target.become_whole()
        return _with_wholes(call)
    return view_of_copy(functools.partial(call.func, **call.kwargs), call.name, *call.args)


def _view_of_weights(call: Call) -> Any:
    """Return a view of the full tensor, which tells the parameter of edits."""
    full = call.args[0].shown()
    rest = wholes(call.args[1:], call.name)
    if call.name == "__get__":
        return getattr(full, call.func.__self__.__name__)  # type: ignore[attr-defined]
    return getattr(full, call.name, functools.partial(call.func, full))(*rest, **call.kwargs)


def _with_wholes(call: Call) -> Any:
    args, values = wholes([list(call.args), list(call.kwargs.values())], call.name)
    return call.func(*args, **dict(zip(call.kwargs, values, strict=True)))


def _in_place(call: Call, full: torch.Tensor, rest: Sequence[Any]) -> None:
    edit = getattr(full, call.name, None)
    if edit is None:
        call.func(full, *rest, **call.kwargs)
    else:
        edit(*rest, **call.kwargs)


# ---- edits
def edited(call: Call) -> Any:
    target = call.args[0]
    if call.name == "__setitem__":  # sets all elements
        target.copy_(torch.as_tensor(call.args[2], device=target.device))
        return None
    args, kwargs = _aligned(call, target)
    with _writing(call.name, [target]), without_torch_function():
        return call.func(target, *args[1:], **kwargs)


def edited_whole(call: Call) -> Any:
    """Edit the whole, since it matters where in it an element is, and keep this rank's piece."""
    target = call.args[0]
    full, *rest = wholes(call.args, call.name)
    if isinstance(full, Aliased):  # tells its parameter of the edit itself
        _in_place(call, full, rest)
    elif target.of_weights:  # `full` is a copy of masters
        edited = full.detach().requires_grad_(target.requires_grad)  # torch may refuse to edit a leaf
        _in_place(call, edited, rest)
        with torch.no_grad(), _writing(call.name, [target]), without_torch_function():
            target.copy_(target.cut(edited))
    else:
        _in_place(call, full, rest)
        with torch.no_grad(), without_torch_function():
            target.copy_(target.cut(full))
    return None if call.name == "__setitem__" else target


def into_plain(call: Call) -> Any:
    """Write to a plain tensor or a full tensor, with the wholes of what is sharded."""
    args, values = wholes([list(call.args), list(call.kwargs.values())], call.name)
    with without_torch_function():
        return call.func(*args, **dict(zip(call.kwargs, values, strict=True)))


def out(call: Call) -> Any:
    kwargs = dict(call.kwargs)
    places = kwargs.pop("out")
    result = call.func(*call.args, **kwargs)
    several = isinstance(places, list | tuple)
    for place, value in zip(places, result, strict=True) if several else [(places, result)]:
        place.copy_(value)
    return places


@contextlib.contextmanager
def _writing(name: str, targets: Iterable[Any]) -> Iterator[None]:
    """Pass the fence around an edit of parameters' pieces: first for those edited before, since that forgets others."""
    weights = {id(t.unit.leaves[t.place]): t for t in targets if isinstance(t, Part) and t.of_weights}
    with contextlib.ExitStack() as gates:
        for part in sorted(weights.values(), key=lambda part: not part.unit.edits.has(part.place)):
            gates.enter_context(part.coordinator.writing(f"{name} on {part.slot.name}", part.unit, part.place))
        yield


# ---- lists
def on_lists(call: Call) -> Any:
    """Serve `torch._foreach_...` in one call. Each row of the lists is routed as a call of its own would be."""
    args = call.args if _alike(call) else _aligned_rows(call)
    with _writing(call.name, call.args[0] if edits(call.name) else ()), without_torch_function():
        results = call.func(*args, **call.kwargs)
    if results is None or edits(call.name):
        return results
    rows = zip(*(arg for arg in call.args if isinstance(arg, list | tuple)), strict=True)
    sources = [next(parts_in(row), None) for row in rows]
    made = [each if source is None else source.derive(each) for each, source in zip(results, sources, strict=True)]
    return type(results)(made)


def _columns(call: Call) -> list[Sequence[Any]]:
    return [arg for arg in call.args if isinstance(arg, list | tuple) and any(isinstance(t, torch.Tensor) for t in arg)]


def _alike(call: Call) -> bool:
    """Are all tensors sharded, and those of each row of one parameter, as in an optimizer's step?"""
    first, *others = _columns(call)
    if not all(isinstance(each, Part) for each in first):
        return False
    for column in others:
        for one, two in zip(first, column, strict=True):
            if not isinstance(two, Part) or two.place != one.place or two._owner is not one._owner:
                return False
    return True


def _aligned_rows(call: Call) -> list[Any]:
    """The arguments with each row made to fit: whole if it writes to a plain tensor, otherwise cut."""
    columns = [list(column) for column in _columns(call)]
    rows = list(zip(*columns, strict=True))
    needed = [part for row in rows for part in _to_be_whole(row, edits(call.name))]
    full = dict(zip(map(id, needed), wholes(needed, call.name), strict=True)) if needed else {}
    for index, row in enumerate(rows):
        to = row[0] if edits(call.name) else next(parts_in(row), None)
        for column in columns:
            value = full.get(id(column[index]), column[index])
            column[index] = _with_a_say(_beside(value, to), to) if isinstance(to, Part) else value
    aligned = iter(columns)
    given = {id(column) for column in _columns(call)}
    return [next(aligned) if id(arg) in given else arg for arg in call.args]


def _to_be_whole(row: Sequence[Any], in_place: bool) -> list[Part]:
    """The sharded tensors of a row that must be made whole: if its target is sharded, those cut otherwise, else all."""
    to = row[0] if in_place else next(parts_in(row), None)
    parts = list(parts_in(row))
    return [part for part in parts if part.cut_like(to) is False] if isinstance(to, Part) else parts


# ---- autograd
def gradients(call: Call) -> Any:
    """Serve torch.autograd.grad. Parameters are given to torch as graph edges and not as tensors, so that torch
    functions stay enabled: code that runs in the backward (a checkpoint, a hook) meets sharded tensors as usual."""
    outputs, inputs, *rest = call.args
    kwargs = dict(call.kwargs)
    asked = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = [each.leaf if isinstance(each, FullTensor) else each for each in asked]
    materialize = kwargs.pop("materialize_grads", False)
    kwargs["allow_unused"] = bool(kwargs.get("allow_unused", False)) or materialize
    edges = [_edge(each) for each in leaves]
    weights = rest.pop(0) if rest else kwargs.pop("grad_outputs", None)
    found = call.func(_as_in_graph(outputs), edges, _as_in_graph(weights), *rest, **kwargs)
    grads = [_gradient(grad, of) for grad, of in zip(found, asked, strict=True)]
    if materialize:
        create_graph = bool(kwargs.get("create_graph", False))
        zeros = functools.partial(torch.zeros_like, requires_grad=create_graph)
        grads = [zeros(of) if grad is None else grad for grad, of in zip(grads, asked, strict=True)]
    return tuple(grads)


def _edge(tensor: Any) -> Any:
    if not isinstance(tensor, Part):
        return tensor
    with without_torch_function():
        return torch.autograd.graph.get_gradient_edge(tensor)


def _as_in_graph(tensors: Any) -> Any:
    """Turn sharded tensors (gradients in a graph) into what the graph has of them: this rank's piece, plain."""
    if isinstance(tensors, list | tuple):
        return [_as_in_graph(each) for each in tensors]
    if not isinstance(tensors, Part):
        return tensors
    with torch.enable_grad(), without_torch_function():
        return tensors.as_subclass(torch.Tensor)


def _gradient(grad: torch.Tensor | None, of: Any) -> torch.Tensor | None:
    if grad is None:
        return None
    if isinstance(of, FullTensor):
        leaf = of.leaf
        assert isinstance(leaf, Part)
        return whole(leaf.derive(grad), "the gradient").to(of.dtype)
    return of.derive(grad) if isinstance(of, Part) else grad


def refused(call: Call) -> Any:
    if written_unseen(call.func) is not None:
        raise UnsupportedError(
            f"{call.first.called}: {call.name} writes to its arguments, and would write to a copy: give it "
            f"p.grad.local for this rank's elements of a gradient; or a whole copy (p.full_tensor().detach().clone(), "
            f"p.grad.full_tensor()), which you write back by copy_()"
        )
    if not edits(call.name):
        raise UnsupportedError(
            f"{call.first.called}: {call.name} asks where in memory elements are, and this rank has a piece of them: "
            f"use indices, or p.full_tensor().clone()"
        )
    raise UnsupportedError(
        f"{call.first.called}: {call.name} would change the shape of this rank's piece and not of what it is a piece "
        f"of: use the function that returns another tensor ({call.name[:-1]}), or p.data = value"
    )


HANDLERS: dict[Route, Callable[[Call], Any]] = {
    Route.MEMORY: on_memory,
    Route.SHAPE: of_shape,
    Route.ELEMENTS: on_pieces,
    Route.LIKE: like,
    Route.CONVERTED: like,
    Route.DRAWN: drawn,
    Route.RESHAPED: reshaped,
    Route.REDUCED: reduced,
    Route.WHOLE: on_wholes,
    Route.IN_GRAPH: _with_wholes,
    Route.EDIT: edited,
    Route.EDIT_WHOLE: edited_whole,
    Route.INTO_PLAIN: into_plain,
    Route.OUT: out,
    Route.LISTS: on_lists,
    Route.REDUCED_LISTS: reduced_lists,
    Route.UNSCALED: unscaled,
    Route.GRADIENTS: gradients,
    Route.REFUSED: refused,
}
