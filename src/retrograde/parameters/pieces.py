"""Leaves and gradients that know they are pieces of something larger.

[Note: pieces]
After sharding, a parameter is still the same `nn.Parameter` object, but its data is a 1-D piece of the shard, and
so is its gradient. Elementwise code (every optimizer, clipping by value, weight decay by hand) needs nothing more.
Three things do, and all are seen in `__torch_function__`:

- what reads *all* of a parameter or gradient, a norm for instance, must give the answer for the whole: a local
  norm would be a silent error in `torch.nn.utils.clip_grad_norm_`, in LAMB, in GradScaler's check for inf. What is
  computed elementwise from a piece is a piece again, so `p.grad.abs().max()` is no trap either (reads.py);
- a parameter in a computation that autograd records stands for the whole: a penalty over `model.parameters()` is
  part of a loss like any other;
- what writes a parameter must first know that no rank still reads it (coordination/fences.py).

Full tensors do not come through here, so forward and backward pay nothing.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from types import EllipsisType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from retrograde.errors import UnsupportedError
from retrograde.pages import RESHAPES, Aliased, FullTensor, edits, views
from retrograde.parameters.answers import OVER_ALL
from retrograde.parameters.copies import StateDictCopies
from retrograde.parameters.filled import Markable, mark_filled
from retrograde.parameters.owner import Owner
from retrograde.parameters.part import JOINED, pieces_in, plain, whole
from retrograde.parameters.reads import DRAWS, JOINS, POSITIONAL, VIEWS, Reads, reads
from retrograde.torch_internals import (
    clip_together,
    raw_grad,
    set_data,
    set_raw_grad,
    set_requires_grad,
    take_hooks,
    tree_flatten,
    tree_unflatten,
    version_of,
    with_torch_function,
    without_torch_function,
)

_TOGETHER = "computing with gradients: zero_grad(), clipping or an edit of p.grad"


class Piece(Markable):
    """Behaviour shared by sharded parameters, their gradients and what is computed from these elementwise."""

    aliases: "MutableMapping[Piece, None]" = {}  # noqa: RUF012 - none, but for parameters

    def like(self, data: torch.Tensor, cls: "type[Piece]", flat: bool = False) -> "Piece":
        """`data` as a piece of what this is a piece of."""
        piece = data.as_subclass(cls)
        piece._owner, piece.place, piece.flat = self._owner, self.place, self.flat or flat
        return piece

    def mark(self, tensor: torch.Tensor, joined: bool = False) -> None:
        """A plain tensor that was filled from this becomes a piece, of the same parameter or of several."""
        tensor.__class__ = Piece
        piece = cast(Piece, tensor)
        piece._owner, piece.flat = self._owner, self.flat
        piece.place = JOINED if joined else self.place

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """In torch the tensor gets other memory, and what `p.data` was before keeps the old: here it gets a copy."""
        for alias in list(self.aliases):
            with without_torch_function():
                set_data(alias, alias.clone())
            alias.__class__ = Piece
        with torch.no_grad():
            self.copy_(value)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: C901 - a table of routes replaces it
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        items = name in ("__getitem__", "__setitem__") and isinstance(args[0], Piece)
        if items and isinstance(args[1], slice | EllipsisType) and args[1] in (..., slice(None)):
            return args[0] if name == "__getitem__" else args[0].copy_(torch.as_tensor(args[2]))
        if name == "view_as" and not isinstance(args[0], Piece) and args[1].place != JOINED:
            return _viewed_as(args[0], args[1])
        if name in RESHAPES and isinstance(args[0], Piece):
            raise UnsupportedError(
                f"rank {args[0].unit.grid.rank}: {name} would change the shape of this rank's piece "
                f"and not of what it is a piece of: use the function that returns another tensor ({name[:-1]})"
            )
        if func in _TRANSPOSED:
            return _on_wholes(func, "transposed", args, kwargs)
        # Attributes are this piece's own, and asked for all the time; pieces of several parameters are vectors.
        if name in ("__get__", "__set__"):
            with without_torch_function():
                return func(*args, **kwargs)
        if items and args[0].place == JOINED:
            with without_torch_function():
                found = func(*args, **kwargs)
            return args[0].like(found, Piece) if name == "__getitem__" and found.dim() == 1 else found
        if not args and (first := kwargs.keys() & _FIRST):
            args = (kwargs.pop(first.pop()),)
        foreach = name.startswith("_foreach_")
        mixed = foreach and any(_is_beside(each) for arg in args if isinstance(arg, list | tuple) for each in arg)
        if mixed:
            args = _aligned_lists(name, args)
        kind = reads(name, getattr(func, "__module__", "") == "torch.nn.functional")
        pieces = list(pieces_in(args))
        beside = [arg for arg in args if isinstance(arg, torch.Tensor) and not isinstance(arg, Piece)]
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*pieces, *beside))
        if _asks_for_all(name, args, kwargs) or (recorded and name in VIEWS and name != "detach"):
            kind = Reads.ALL
        for piece in pieces if edits(name) or kind is not Reads.LOCAL else ():
            if isinstance(piece, ShardedGradient):
                piece.coordinator.flush_pending_gradients("p.grad is used")
                if edits(name) or (kind is Reads.ELEMENTS and name not in OVER_ALL):
                    piece.coordinator.catch_up_on_gradients(_TOGETHER)
        if name in OVER_ALL or (kind is not Reads.LOCAL and not edits(name)):
            if recorded:
                return func(*_wholes(args, name), **kwargs)  # part of a loss: it must be differentiable
            result = OVER_ALL[name](func, args, kwargs) if name in OVER_ALL else NotImplemented
            if result is not NotImplemented:
                return result
            others = (*args[1:], *kwargs.values())
            if kind is Reads.ALL or (name in OVER_ALL and not any(isinstance(arg, torch.Tensor) for arg in others)):
                return _on_wholes(func, name, args, kwargs)
        if edits(name) and (name in POSITIONAL if isinstance(args[0], Piece) else _takes_wholes(name, args)):
            return _edited(func, name, args, kwargs)
        if beside and (edits(name) or kind is Reads.ELEMENTS) and name not in ("to", "type_as"):
            args = [_aligned(arg, pieces[0]) if isinstance(arg, torch.Tensor) else arg for arg in args]
        if name in DRAWS and isinstance(args[0], Piece) and args[0].place != JOINED:
            return _drawn(func, args, kwargs)
        given = args
        if name == "grad":  # of a full tensor beside its unit's parameters torch has the gradient before it is reduced
            args = (args[0], [each.leaf if isinstance(each, FullTensor) else each for each in args[1]], *args[2:])
        with contextlib.ExitStack() as gates:
            for leaf in _written(name, args, kwargs):
                gates.enter_context(leaf.coordinator.writing(f"{name} on {leaf.slot.name}", leaf.unit, leaf.place))
            gates.enter_context(without_torch_function())
            result = func(*args, **kwargs)
        if pieces and (mixed or not foreach) and (edits(name) or "out" in kwargs):
            from_gradients = not all(isinstance(piece, ShardedParameter | _Alias) for piece in pieces)
            mark_filled(name, args, kwargs, pieces, from_gradients)
        return _keep(result, name, kind, given)

    def numpy(self, *, force: bool = False) -> Any:
        """The whole, to which numpy refuses to write: it would not reach the piece."""
        array = super().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def detach_(self) -> Any:
        return super().detach_() if self.requires_grad else self  # torch refuses it for any view

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file nothing would say that it is a piece, and of what."""
        if self.place == JOINED or self.unit.layout.world > 1:
            of = "several parameters" if self.place == JOINED else f"parameter {self.slot.name}"
            raise UnsupportedError(
                f"rank {self.unit.grid.rank}: pickling or saving this rank's piece of {of}, as if it were all of it. "
                f"Save model.state_dict() or entries of it, engine.full_grad(p) for a gradient, optimizer.state_dict() "
                f"for an optimizer's state; for this rank's elements use p.data.as_subclass(torch.Tensor), which is "
                f"plain"
            )
        return self.slot.full(plain(self)).reshape(self.whole).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        kept = OptimizerState if isinstance(self, OptimizerState) else Piece
        return memo.setdefault(id(self), self.like(plain(self), kept))  # type: ignore[no-any-return]


class _Alias(Piece):
    """A view of a sharded parameter (`p.data`, `p.detach()`, `p.view(-1)`): writing it writes the parameter."""


class OptimizerState(Piece):
    """What `optimizer.state_dict()` holds: each rank saves its own, which says whose it is (state.py)."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ShardedGradient(Piece):
    """What `p.grad` is: this rank's piece of the reduced gradient."""


clip_together(ShardedGradient)  # so that clipping is one meeting


class ShardedParameter(Piece, nn.Parameter):
    """The class of a parameter after sharding. `p.full()` is the whole of it; `p` itself is this rank's piece."""

    copies: StateDictCopies | None

    @staticmethod
    def adopt(param: nn.Parameter, owner: Owner, place: int) -> None:
        """Turn a plain parameter, whose data is already the piece, into a sharded one. Identity is kept."""
        param.__class__ = ShardedParameter
        leaf = cast(ShardedParameter, param)
        leaf._owner = weakref.ref(owner)
        leaf.place = place
        leaf.aliases = WeakTensorKeyDictionary()
        leaf.copies = None
        # Hooks registered before sharding get the same treatment as those registered after it. Their tables stay what
        # they are, so that the handles users hold still remove them.
        before, after = take_hooks(leaf)
        if before:
            leaf.register_hook(lambda grad: _run_all(before, grad))
        if after:
            leaf.register_post_accumulate_grad_hook(lambda leaf: _run_all(after, leaf))

    @property
    def requires_grad(self) -> bool:
        return self.unit.trained[self.place]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        set_requires_grad(self, value)
        self.unit.trained[self.place] = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedParameter":
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As torch's. The hook sees this rank's piece of the reduced gradient, once a reduction, and nothing when a
        backward brings no gradient: a unit's node runs for all of its parameters, torch's only for those used."""

        def run(grad: torch.Tensor | None) -> Any:
            with with_torch_function():  # where parameters were given to backward it is off
                return None if grad is None else hook(self.like(grad, Piece))

        with without_torch_function():
            return super().register_hook(run)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As torch's: runs when a reduced gradient has been added to `.grad`, so at the end of a window."""

        def arrived(leaf: torch.Tensor) -> None:
            with with_torch_function():
                if self.owner.graph.arrived[self.place]:
                    hook(leaf)

        with without_torch_function():
            return super().register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    @torch.inference_mode(mode=False)
    def copy_for(self, destination: Mapping[str, object]) -> torch.Tensor:
        """What `state_dict()` has of it (copies.py)."""
        full = self.full()
        if self.copies is None:
            self.copies = StateDictCopies(self.slot.name, self.unit.grid.rank, full.dtype, full.device)
        return self.copies.copy(full, version_of(self.unit.pieces[self.place]), destination)

    def check_copies(self) -> None:
        if self.copies is not None:
            self.copies.check()

    def forget_writes_to_copies(self) -> None:
        if self.copies is not None:
            self.copies.forget_writes()

    def full(self) -> torch.Tensor:
        if self.copies is not None:
            self.copies.check()
        owner = self.owner
        return owner.pager.full(owner.unit, self.place)

    @property
    def grad(self) -> torch.Tensor | None:
        if not self.orphaned:
            self.coordinator.flush_pending_gradients("p.grad was read")
        raw: torch.Tensor | None = raw_grad(self)
        if raw is not None and type(raw) is not ShardedGradient:
            raw = self.like(raw, ShardedGradient)
            set_raw_grad(self, raw)
        return raw

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if not self.orphaned:
            self.coordinator.catch_up_on_gradients(_TOGETHER)
            self.owner.flow.forget(self.unit, self.place)
        if value is not None and value.shape == self.slot.shape != self.shape:
            value = self.piece_of(value)
        set_raw_grad(self, value)

    grad = grad.deleter(lambda self: setattr(self, "grad", None))  # type: ignore[attr-defined]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = f"piece {tuple(self.shape)} of {tuple(self.slot.shape)} on rank {self.unit.grid.rank}"
        return f"ShardedParameter({self.slot.name}: {where}, {self.dtype}, requires_grad={self.requires_grad})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"parameter {self.slot.name} is sharded and cannot be copied or pickled: other ranks have other pieces. "
            f"Use engine.full_params() for the whole, p.detach().clone() for this piece, or save model.state_dict()"
        )

    __deepcopy__ = __reduce_ex__  # type: ignore[assignment]


def _run_all(hooks: dict[int, Callable[[torch.Tensor], Any]], grad: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        if (changed := hook(grad)) is not None:
            grad = changed
    return grad


# ---- arguments and results
def _wholes(args: Any, name: str) -> Any:
    """The arguments with everything that is a piece made whole, in one meeting."""
    leaves, spec = tree_flatten(list(args))
    pieces = [leaf for leaf in leaves if type(leaf) in (Piece, OptimizerState, ShardedGradient)]
    if any(piece.place == JOINED for piece in pieces):
        raise UnsupportedError(f"{name} of parts of several parameters: use p.full() or engine.full_grad(p) for each")
    recorded = [piece for piece in pieces if torch.is_grad_enabled() and piece.requires_grad]
    wholes = {}
    for piece in recorded:
        full = piece.owner.graph.regather(piece.place, piece.as_subclass(torch.Tensor))
        wholes[id(piece)] = full.reshape(piece.whole)
    if rest := [piece for piece in pieces if id(piece) not in wholes]:
        wholes |= zip(map(id, rest), whole(name, rest, lambda: map(plain, rest)), strict=True)
    for leaf in leaves:
        if isinstance(leaf, ShardedParameter | _Alias):
            full = leaf.owner.pager.full(leaf.unit, leaf.place)
            wholes[id(leaf)] = full if isinstance(leaf, ShardedParameter) else full.detach().reshape(leaf.whole)
    return tree_unflatten([wholes.get(id(leaf), leaf) for leaf in leaves], spec)


_FIRST = {"input", "self", "tensor", "tensors"}  # names of a first argument
_FLAT = {"view", "reshape", "flatten", "ravel"}
_TRANSPOSED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}


def _on_wholes(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """A view of a parameter is one of its full tensor. One of a gradient is of a copy, to which nobody may write."""
    view = views(name) or func in _TRANSPOSED
    if view and isinstance(args[0], ShardedParameter | _Alias):
        full, *rest = _wholes(args, name)
        return getattr(full, name, functools.partial(func, full))(*rest, **kwargs)
    graph = torch.is_grad_enabled() and any(piece.requires_grad for piece in pieces_in(args))
    with torch.inference_mode() if view and not graph else contextlib.nullcontext():
        return func(*_wholes(args, name), **kwargs)


def _viewed_as(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A plain tensor in the shape of a parameter: of as many elements as the whole has, or nobody knows which."""
    if tensor.numel() != piece.slot.numel:
        raise UnsupportedError(
            f"rank {piece.unit.grid.rank}: a tensor of shape {tuple(tensor.shape)} viewed as parameter "
            f"{piece.slot.name}, of shape {tuple(piece.whole)}, of which this rank has a piece of shape "
            f"{tuple(piece.shape)}. If it is part of a vector of all parameters, call parameters_to_vector() and "
            f"vector_to_parameters() both under torch.no_grad()"
        )
    return tensor.view(piece.shape if piece.shape == tensor.shape else piece.whole)


def _takes_wholes(name: str, args: Any) -> bool:
    """Is a plain tensor edited that is not of a piece's size? A full tensor is not, whatever its size."""
    place = args[0][args[1]] if name == "__setitem__" else args[0]
    if not isinstance(place, torch.Tensor):
        return False
    return isinstance(place, Aliased) or place.shape != next(pieces_in(args)).shape


def _edited(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """An edit that asks where in the whole an element is, or one of a plain tensor by a piece."""
    if not isinstance(args[0], Aliased | Piece) and not all(
        isinstance(p, ShardedParameter | _Alias) for p in pieces_in(args)
    ):
        raise UnsupportedError(f"{name} with a part of a gradient: write x = x + p.grad, or use engine.full_grad(p)")
    full, *rest = _wholes(args, name)
    if full is args[0]:
        with without_torch_function():
            return func(full, *rest, **kwargs)
    getattr(full, name)(*rest, **kwargs)
    return args[0] if isinstance(args[0], ShardedParameter | _Alias) else args[0].copy_(args[0].piece_of(full))


def _aligned(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What lies beside a piece: of a tensor like the whole, the part that belongs there."""
    if isinstance(tensor, Piece) or tensor.shape in ((), (1,), piece.shape) or piece.place == JOINED:
        return tensor
    fits = all(size in (1, whole) for size, whole in zip(tensor.shape[::-1], piece.whole[::-1], strict=False))
    return piece.piece_of(tensor.expand(piece.whole)) if fits and tensor.dim() <= len(piece.whole) else tensor


def _is_beside(each: Any) -> bool:
    """A tensor that is no piece. In an optimizer's step there is none among them."""
    return not isinstance(each, Piece) and isinstance(each, torch.Tensor)


def _aligned_lists(name: str, args: Any) -> Any:
    """The same for lists of tensors: each is aligned with the piece that has its place in another list."""
    columns = [arg for arg in args if isinstance(arg, list | tuple)]
    rows = [list(pieces_in(row)) for row in zip(*columns, strict=False)]
    aligned = []
    for arg in args:
        if not isinstance(arg, list | tuple):
            aligned.append(arg)
            continue
        column = list(arg)
        for index, pieces in enumerate(rows):
            tensor = column[index]
            if not pieces or not isinstance(tensor, torch.Tensor) or _aligned(tensor, pieces[0]) is tensor:
                continue
            if not aligned and edits(name):
                raise UnsupportedError(
                    f"rank {pieces[0].unit.grid.rank}: {name} of a tensor of shape {tuple(tensor.shape)} with this "
                    f"rank's piece of parameter {pieces[0].slot.name}: start from pieces (p.detach().clone()), or edit "
                    f"whole tensors one by one (x.lerp_(p.detach(), weight))"
                )
            column[index] = _aligned(tensor, pieces[0])
        aligned.append(column)
    return tuple(aligned)


def _asks_for_all(name: str, args: Any, kwargs: Any) -> bool:
    """Because of its arguments: a shape that is not this piece's own is one of the whole's."""
    if name == "where":
        return len(args) == 1
    if name in JOINS:
        along = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return along != 0 or not all(isinstance(each, Piece) for each in args[0])
    given = [*args[1:], *(kwargs[key] for key in ("shape", "size") if key in kwargs)]
    if name not in ("view", "reshape") or not given or isinstance(given[0], torch.dtype):
        return False
    sizes = list(given[0]) if isinstance(given[0], list | tuple) else given
    return sizes not in ([-1], list(args[0].shape))


def _written(name: str, args: Any, kwargs: Any) -> list[Any]:
    """The sharded parameters a function is about to change; first those edited before, whose fence forgets the rest."""
    out = kwargs.get("out")
    targets = out if out is not None else args[0] if args and edits(name) else ()
    found = targets if isinstance(targets, list | tuple) else (targets,)
    leaves = {id(t.unit.leaves[t.place]): t for t in found if isinstance(t, ShardedParameter | _Alias)}
    return sorted(leaves.values(), key=lambda leaf: not leaf.unit.edits.has(leaf.place))


def _keep(result: Any, name: str, kind: Reads, args: Any) -> Any:
    """The result as the piece it is."""
    if isinstance(result, list | tuple) and name.startswith("_foreach_"):
        columns = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == len(result)]
        return type(result)(_keep(r, "", kind, a) for r, *a in zip(result, *columns, strict=True))
    if name == "grad":  # torch.autograd.grad(outputs, inputs)
        return tuple(_gradient(grad, of) for grad, of in zip(result, args[1], strict=True))
    if name in _FLAT and isinstance(result, Piece):
        result = result.as_subclass(torch.Tensor)  # torch returns what has one dimension already as it is
    if type(result) is not torch.Tensor or (source := next(pieces_in(args), None)) is None:
        return result
    joined, like = isinstance(args[0], list | tuple), kind is Reads.ELEMENTS or name.endswith("_like") or name in VIEWS
    if not like or (not joined and result.numel() != source.numel()):
        return result
    if name in VIEWS and isinstance(source, ShardedParameter | _Alias):
        alias = source.like(result, _Alias, name in _FLAT)
        cast(ShardedParameter, source.unit.leaves[source.place]).aliases[alias] = None
        return alias
    cls = ShardedGradient if name in VIEWS and isinstance(source, ShardedGradient) else Piece
    piece = source.like(result, cls, name in _FLAT)
    piece.place = JOINED if joined else piece.place
    return piece


def _drawn(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Random numbers for a piece: drawn for the whole, as torch does, so that ranks with one seed draw one tensor."""
    piece = args[0]
    blank = piece.slot.full(piece.new_empty(piece.slot.numel))
    blank.requires_grad_(piece.requires_grad)  # torch may refuse to edit a leaf
    mine = piece.piece_of(func(blank, *args[1:], **kwargs))
    with torch.no_grad():
        return piece.copy_(mine) if edits(func.__name__) else piece.like(mine, Piece)


def _gradient(grad: torch.Tensor | None, of: Any) -> torch.Tensor | None:
    if grad is not None and isinstance(of, FullTensor):
        return cast(torch.Tensor, _wholes([cast(Piece, of.leaf).like(grad, Piece)], "the gradient")[0])
    return of.like(grad, Piece) if grad is not None and isinstance(of, ShardedParameter) else grad
