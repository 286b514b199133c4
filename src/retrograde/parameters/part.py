"""A tensor of which each rank holds a piece: it knows of which parameter, and how large the whole is.

Its memory is one-dimensional: this rank's piece of the elements, in the order in which they lie in the parameter. Its
shape is the whole's, and asking for it involves no other rank.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from retrograde.coordination import Coordinator
from retrograde.layout import Slot
from retrograde.layout.flat import row_by_row
from retrograde.pages import Unit, alive
from retrograde.parameters.owner import Owner
from retrograde.torch_internals import without_torch_function
from retrograde.transport import Value

V = TypeVar("V", bound=Value)
USED_TOGETHER = "computing with gradients: zero_grad(), clipping or an edit of p.grad"  # where ranks meet for it


class Part(torch.Tensor):
    """What routes and handlers know of a sharded tensor. sharded_tensor.py has the classes that users meet."""

    _owner: "weakref.ref[Owner]"
    place: int
    _shape: torch.Size
    of_weights = False  # its memory is the parameter's: a write to it passes the fence
    of_gradients = False  # its memory is a gradient's: before it is used, other ranks' gradients are added up too
    passing = False  # it was computed and nothing else shares its memory: a view may make it whole and plain

    # ---- whose it is
    @property
    def owner(self) -> Owner:
        return alive(self._owner)

    @property
    def orphaned(self) -> bool:
        """Is the model gone?"""
        return self._owner() is None

    @property
    def unit(self) -> Unit:
        return self.owner.unit

    @property
    def stands_for_whole(self) -> bool:
        """Is it a parameter that `Engine.full_params(leaves=True)` holds?"""
        owner = self._owner() if self.of_weights else None
        return owner is not None and self.place in owner.unit.whole_leaves

    @property
    def coordinator(self) -> Coordinator:
        return self.owner.coordinator

    @property
    def slot(self) -> Slot:
        return self.unit.layout.slots[self.place]

    @property
    def called(self) -> str:
        return f"rank {self.unit.grid.rank}: parameter {self.slot.name}"

    # ---- the whole's shape
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._shape)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._shape.numel() * self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def dim(self) -> int:
        return len(self._shape)

    ndimension = dim

    def numel(self) -> int:
        return self._shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of a 0-d tensor")
        return self._shape[0]

    def blank(self) -> torch.Tensor:
        """A tensor like the whole on the meta device, by which torch answers questions about shapes."""
        own = self.slot.strides
        strides = own if own is not None and self._shape == self.slot.shape else row_by_row(self._shape)
        return torch.empty_strided(self._shape, strides, dtype=self.dtype, device="meta")

    # ---- the piece and the whole
    @property
    def local(self) -> torch.Tensor:
        """This rank's piece, a plain tensor on the same memory: its elements, one after the other."""
        if self.of_weights:
            self.coordinator.expose()
        if self.of_gradients:
            self.coordinator.give_out_gradients(USED_TOGETHER)
        return self.piece

    @property
    def piece(self) -> torch.Tensor:
        """This rank's piece as a plain tensor, for callers that do not write to it."""
        with without_torch_function():
            return self.detach().as_subclass(torch.Tensor)

    def full_tensor(self) -> torch.Tensor:
        """The whole, on every rank. All ranks ask together."""
        raise NotImplementedError

    def shown(self) -> torch.Tensor:
        """The whole of a weight as modules see it, in the page's dtype and memory. An edit of it reaches the shard."""
        raise NotImplementedError

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a plain tensor in the whole's shape."""
        layout = self.unit.layout
        return self.slot.flatten(full.reshape(self.slot.shape))[layout.within(self.slot, self.unit.rank)]

    def put_together(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, put together from the pieces of all ranks."""
        return self.slot.full(torch.cat(list(pieces))).reshape(self._shape)

    def cut_like(self, other: "Part") -> bool:
        """Has each rank the same elements of both? All ranks find the same."""
        if self._owner is other._owner and self.place == other.place:
            return True
        one, two = self.unit, other.unit
        return one.grid.owners == two.grid.owners and one.layout.cuts[self.place] == two.layout.cuts[other.place]

    def become_whole(self) -> None:
        """Turn this tensor, on every rank, into a plain one with all elements."""
        raise NotImplementedError

    # ---- others like it
    def derive(self, data: torch.Tensor) -> "Part":
        """Make a sharded tensor of `data`, which was computed element by element from this piece."""
        raise NotImplementedError

    def reshaped(self, data: torch.Tensor, shape: torch.Size) -> "Part":
        """Make a sharded tensor of this shape of `data`, which has the same memory as this piece."""
        raise NotImplementedError


def parts_in(values: Iterable[Any]) -> Iterator[Part]:
    """The sharded tensors among these, and in lists among these."""
    for value in values:
        if isinstance(value, Part):
            yield value
        elif isinstance(value, list | tuple):
            yield from parts_in(value)


def bring_gradients(parts: Iterable[Part], meet: bool) -> None:
    """Before gradients are used, reduce those still pending and, if `meet`, those of ranks that did more backwards."""
    for owner in {part._owner for part in parts if part.of_gradients}:
        if (found := owner()) is None:
            continue
        found.coordinator.flush_pending_gradients("p.grad is used")
        if meet:
            found.coordinator.catch_up_on_gradients(USED_TOGETHER)


def everybodys(what: str, parts: Sequence[Part], value: Callable[[], V]) -> list[V]:
    """The values of all ranks that hold pieces of these tensors, in the order of the pieces."""
    return parts[0].coordinator.shard_values(_named(what, parts), value)


def everybodys_tensors(what: str, parts: Sequence[Part], value: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """As `everybodys`, where each value is a tensor of the same shape and dtype on all ranks."""
    return parts[0].coordinator.tensors(_named(what, parts), value)


def _named(what: str, parts: Sequence[Part]) -> str:
    return f"{what} of {parts[0].slot.name}" + f" and {len(parts) - 1} more" * (len(parts) > 1)


def together(
    what: str, parts: Sequence[Part], mine: Callable[[], list[torch.Tensor | None]]
) -> list[torch.Tensor | None]:
    """The wholes of `parts` from all ranks' pieces, in one meeting; None for a part of which some rank has no piece.

    `mine` returns this rank's pieces, plain. It is called again if gradients came while this rank waited."""
    by_rank = everybodys(what, parts, mine)
    found: list[torch.Tensor | None] = []
    for part, *pieces in zip(parts, *by_rank, strict=True):
        found.append(None if any(piece is None for piece in pieces) else part.put_together(pieces))
    return found
