"""The memory of tensors: which tensors share it, what refers to it, and whether it was written to."""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from retrograde.torch_internals.probes import When, expect, find, measured, probe, tiny

_T = TypeVar("_T")

# ---- whose memory it is


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is the same for tensors that share memory, and for no other tensors that are alive."""
    number: int = tensor.untyped_storage()._cdata
    return number


@probe(
    "the identity of memory",
    "storage_id",
    needed_for="recognising tensors that alias a page when autograd saves them",
    otherwise="graphs hold pages themselves, so memory is that of the whole model",
)
def _storages_have_an_identity() -> None:
    """Assumes: a storage's `_cdata` is the same for all tensors on it, and another for any other storage."""
    tensor = tiny()
    expect(storage_id(tensor[1:]) == storage_id(tensor), True, "whether a view has the number of its base")
    expect(storage_id(tensor.detach()) == storage_id(tensor), True, "whether an alias has the number of its tensor")
    other = tiny()
    expect(storage_id(other) == storage_id(tensor), False, "whether another tensor has the same number")


_users: Callable[[int], int] = find("torch._C:_storage_Use_Count")


def _count_users(tensor: torch.Tensor) -> int:
    return _users(tensor.untyped_storage()._cdata)


_ASKING = measured(lambda: _count_users(tiny()) - 1)
"""How many users asking adds: torch makes an object for the storage when it is first asked for it."""


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and other objects, of Python or C++, refer to this tensor's memory; 1 if only this one does."""
    return _count_users(tensor) - _ASKING


@probe(
    "users of memory",
    "storage_users",
    needed_for="dropping a page when nothing refers to it, and only then",
    otherwise="a page that is in use is dropped and its memory reused, so numbers are wrong; or none is ever dropped",
)
def _storages_count_their_users() -> None:
    """Assumes: the use count of a storage is one for each tensor on it, of Python or of a graph, and a constant."""
    tensor = tiny()
    expect(storage_users(tensor), 1, "the number of users of a tensor that is alone")
    view, alias = tensor[1:], tensor.detach()
    expect(storage_users(tensor), 3, "the number of users of a tensor, a view and an alias")
    graph = tensor[1:].requires_grad_() * tiny(1)
    expect(storage_users(tensor), 4, "the number of users when a graph has saved another view")
    del view, alias, graph
    expect(storage_users(tensor), 1, "the number of users when all others are gone")


# ---- who refers to a tensor
_references: Callable[[Any], int] = sys.getrefcount
_owners: Callable[[torch.Tensor], int] = find("torch:Tensor._use_count")


def _most_references(tensors: tuple[torch.Tensor, ...]) -> int:
    return max(map(_references, tensors), default=0)


_ALONE = measured(lambda: _most_references((tiny(), tiny(), tiny())))
"""References to a tensor that only its tuple has: how many asking adds depends on the Python, so it is measured."""


def held_elsewhere(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Does anything but the tuple refer to one of these tensors, in Python or in torch?"""
    return _most_references(tensors) > _ALONE or max(map(_owners, tensors), default=0) > 1


@probe(
    "references to a tensor",
    "held_elsewhere",
    needed_for="dropping a page when nothing refers to it, and only then",
    otherwise="a weight that is in use shows zeros or another weight's numbers; or no page is ever dropped",
)
def _references_are_counted() -> None:
    """Assumes: Python counts one reference for each variable or container that has an object, and `_use_count` of a
    tensor is 1 if only its Python object owns it, and more if a graph does too."""
    tensors = (tiny(), tiny(requires_grad=True))
    expect(held_elsewhere(tensors), False, "whether tensors are held that only their tuple has")
    variable = tensors[1]
    expect(held_elsewhere(tensors), True, "whether a tensor is held that a variable has")
    del variable
    container = [tensors[0]]
    expect(held_elsewhere(tensors), True, "whether a tensor is held that a list has")
    del container
    expect(max(map(_owners, tensors)), 1, "the number of owners of tensors that only Python has")
    graph = tensors[1] * tensors[1]
    expect(_owners(tensors[1]) > 1, True, "whether a tensor that a graph has has more owners")
    expect(held_elsewhere(tensors), True, "whether a tensor is held that a graph has")
    del graph
    expect(held_elsewhere(tensors), False, "whether tensors are held when all else is gone")


# ---- who has the memory of a gradient
_Arrived = tuple[torch.Tensor | None, ...]
"""The gradients that a node's backward was called with: that tuple itself, since others refer to what is in it too."""


def lone_gradients(grads: _Arrived, least: int) -> list[int]:
    """The places of gradients of at least `least` bytes to whose memory nothing else refers, now or after the backward.
    A caller that keeps such a gradient may write to it."""
    return [place for place in range(len(grads)) if _has_memory(grads[place], least) and _is_lone(grads, place)]


def _has_memory(grad: torch.Tensor | None, least: int) -> bool:
    """Has the gradient memory of its own, from torch's allocator, and no more than it needs? If it is a view (of a
    product, transposed), its base may refer to the memory too."""
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided or grad.nbytes < least:
        return False
    users = storage_users(grad)
    if is_view(grad) and _holders_of_base(grad).at_most(_holders_of_a_lone_base()):
        users -= 1
    storage = grad.untyped_storage()
    return users == 1 and storage.nbytes() == grad.nbytes and storage.resizable()  # no array of NumPy's


def _is_lone(grads: _Arrived, place: int) -> bool:
    return _holders(grads, place).at_most(_holders_of_a_lone_one())


class _Holders(NamedTuple):
    references: int
    owners: int

    def at_most(self, other: "_Holders") -> bool:
        return self.references <= other.references and self.owners <= other.owners


def _holders(grads: _Arrived, place: int) -> _Holders:
    grad = grads[place]
    assert grad is not None
    return _Holders(_references(grad), _owners(grad))


def _holders_of_base(view: torch.Tensor) -> _Holders:
    base = base_of(view)
    assert base is not None
    return _Holders(_references(base), _owners(base))


@functools.cache
def _holders_of_a_lone_base() -> _Holders:
    """The references to a base to which only its view refers."""
    return _holders_of_base(tiny()[:])


@functools.cache
def _holders_of_a_lone_one() -> _Holders:
    """The references to a gradient that autograd's engine holds while it calls a backward."""
    (found,) = _look_at_gradients(lambda tensor: tensor * 2, lambda grads: _holders(grads, 0))
    return found


def _look_at_gradients(use: Callable[[Any], Any], look: Callable[[_Arrived], _T]) -> list[_T]:
    """Run a backward in which `use` uses the result of a node, and return what `look` finds in the node's gradients."""
    found: list[_T] = []
    with torch.enable_grad():  # this may be called in a backward, where it is off
        (result,) = _Node.apply(lambda grads: found.append(look(grads)), tiny(requires_grad=True))  # type: ignore[no-untyped-call]
        use(result).sum().backward(retain_graph=True)
    return found


class _Node(torch.autograd.Function):
    """A node that is made as those of a unit are (gradients/graph.py)."""

    @staticmethod
    def forward(ctx: Any, look: Callable[[_Arrived], None], *tensors: torch.Tensor) -> Any:
        ctx.look = look
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.look(grads)
        return (None,) * (1 + len(grads))


@probe(
    "who has a gradient",
    "lone_gradients",
    needed_for="sending a gradient from where it is, now or after other backwards have added to it, without a copy",
    otherwise="a gradient that a hook or a graph has changes with the next backward, or is changed before it is sent",
    when=When.FIRST_USE,
)
def _holders_of_gradients_are_counted() -> None:
    """Assumes: gradients with which a backward is called have as many references and owners as the engine adds, if
    nobody else has them, and more if a hook, a view, another node or a graph does; memory that is not torch's is not
    resizable."""
    kept: list[Any] = []

    def hooked(tensor: Any, keep: Callable[[Any], Any]) -> Any:
        tensor.register_hook(lambda grad: kept.append(keep(grad)))
        return tensor * 2

    other = tiny(requires_grad=True) * 2  # whose node, made earlier, runs later
    uses: dict[str, Callable[[Any], Any]] = {
        "a hook has": lambda tensor: hooked(tensor, lambda grad: grad),
        "a hook has as a base": lambda tensor: hooked(tensor.view(2, 1), lambda grad: grad),
        "a hook has a view of": lambda tensor: hooked(tensor, lambda grad: grad[1:]),
        "a hook has an alias of": lambda tensor: hooked(tensor, lambda grad: grad.detach()),
        "another node gets": lambda tensor: (tensor + other) * 2,
        "a buffer of Python's has": _Borrowing.apply,
        "a node keeps": _Keeping.apply,
        "a node keeps as a base": lambda tensor: _Keeping.apply(tensor.view(2, 1)),  # type: ignore[no-untyped-call]
    }
    expect(_look_at_gradients(lambda tensor: tensor * 2, _places), [[0]], "which gradients nobody else has")
    expect(_look_at_gradients(lambda tensor: tensor.view(2, 1) * 2, _places), [[0]], "which views nobody else has")
    for who, use in uses.items():
        expect(_look_at_gradients(use, _places), [[]], f"which gradients nobody else has of one that {who}")


def _places(grads: _Arrived) -> list[int]:
    return lone_gradients(grads, least=1)


class _Borrowing(torch.autograd.Function):
    """A function whose gradient is in memory that is not torch's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(grad.nbytes), dtype=grad.dtype)


class _Keeping(torch.autograd.Function):
    """A function that computes its gradient in forward, and keeps it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor * 2)
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors
        return made  # type: ignore[no-any-return]


# ---- whether it was written to
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor's memory was written to, through it or its views and aliases."""


@probe(
    "the version of a tensor",
    "version_of",
    needed_for="noticing optimizer steps and edits of weights, by which pages become stale",
    otherwise="a forward after optimizer.step() computes with the weights before it",
)
def _writes_are_counted() -> None:
    """Assumes: a write through a tensor, a view or `detach()` of it moves one counter, which `.data` does not share."""
    tensor = tiny()
    view, alias, data = tensor[1:], tensor.detach(), tensor.data
    before = version_of(tensor)
    for written in (tensor, view, alias):
        written.add_(1)
    expect(version_of(tensor) - before, 3, "how far a counter has moved with three writes")
    expect([version_of(view), version_of(alias)], [version_of(tensor)] * 2, "the counters of a view and an alias")
    data.add_(1)
    expect(version_of(tensor) - before, 3, "the counter after a write through .data")
    torch.autograd.graph.increment_version(tensor)
    expect(version_of(tensor) - before, 4, "the counter after increment_version()")


# ---- what a view is a view of
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that this one is a view of, as autograd sees it; None if it is no view."""


def is_view(tensor: torch.Tensor) -> bool:
    """Is the tensor a view to autograd?"""
    return tensor._is_view()


def alias_without_base(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that is no view to autograd: it has a node and a version counter of its own."""
    alias: torch.Tensor = unsafe_view(tensor, tensor.shape)
    return alias


unsafe_view: Callable[..., Any] = find("torch:ops.aten._unsafe_view")
"""The operator that makes it, for code that Dynamo follows: it does not look into functions of this package."""


@probe(
    "views and what they are of",
    "base_of",
    "is_view",
    "alias_without_base",
    "unsafe_view",
    needed_for="weight gradients of a pipeline that wait for W, its microbatches, and buffers filled from gradients",
    otherwise="edits in place of a microbatch or of a routed product's result are refused by autograd",
)
def _views_know_their_base() -> None:
    """Assumes: a view has its tensor as `_base` and says that it is one; `_unsafe_view` makes an alias that does not
    and whose writes are counted apart."""
    tensor = tiny()
    view = tensor[1:]
    expect(base_of(view) is tensor and is_view(view), True, "whether a view has its tensor as base")
    expect(base_of(tensor) is None and not is_view(tensor), True, "whether a tensor that is no view has no base")
    alias = alias_without_base(tensor)
    alias.add_(1)
    expect(is_view(alias), False, "whether an unsafe view is a view")
    expect(tensor.tolist(), [2.0, 2.0], "what was written through it")
    expect(version_of(tensor), 0, "the counter of its tensor after a write through it")
