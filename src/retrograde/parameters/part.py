"""A tensor that is this rank's part of something larger: of what, and where."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from retrograde.coordination import Coordinator
from retrograde.errors import UnsupportedError
from retrograde.layout import Slot
from retrograde.pages import Unit, alive
from retrograde.parameters.owner import Owner
from retrograde.torch_internals import without_torch_function

JOINED = -1  # the place of a piece that was put together from several


class Part(torch.Tensor):
    """Where a piece (pieces.py) belongs."""

    _owner: "weakref.ref[Owner]"
    place: int
    flat = False  # a piece of the flattened whole (`p.grad.flatten()`)

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
    def coordinator(self) -> Coordinator:
        return self.owner.coordinator

    @property
    def slot(self) -> Slot:
        return self.unit.layout.slots[self.place]

    @property
    def whole(self) -> torch.Size:
        """The shape of what this is a piece of."""
        return torch.Size([self.slot.numel]) if self.flat else self.slot.shape

    def dim(self) -> int:
        """The whole's, by which people choose what decays."""
        return 1 if self.place == JOINED else len(self.whole)

    ndim = property(dim)

    def ndimension(self) -> int:
        """torch's initializers ask this before they take rows and columns for those of the whole."""
        if self.place == JOINED:
            return 1
        raise UnsupportedError(
            f"{self._called}.ndimension(): it is this rank's piece, whose rows are not those of the parameter. Use "
            f"p.dim(), or do it with the module's attribute (module.weight), which is whole"
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{self._called}.set_(): its memory is part of a shard; use p.data = value or copy_")

    def size(self, dim: int | None = None) -> Any:
        with without_torch_function():
            if dim is None or dim in (0, -1) or self.place == JOINED:
                return super().size() if dim is None else super().size(dim)
        raise UnsupportedError(
            f"{self._called}.size({dim}): it is this rank's piece, a vector; the parameter's shape is "
            f"{tuple(self.whole)}. Use the module's attribute (module.weight.size({dim})), which is whole"
        )

    @property
    def _called(self) -> str:
        return f"rank {self.unit.grid.rank}: parameter {self.slot.name}"

    def piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a full-shaped tensor."""
        return self.slot.flatten(full)[self.unit.layout.within(self.slot, self.unit.rank)]


def pieces_in(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, Part):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from pieces_in(arg)


def whole(what: str, pieces: Sequence[Part], local: Callable[[], Iterable[Any]]) -> list[torch.Tensor | None]:
    """What `pieces` are pieces of, from everybody's `local` parts, in one meeting; None where a rank has none."""

    def put_together(piece: Part, *parts: Any) -> torch.Tensor | None:
        if any(part is None for part in parts):
            return None
        return piece.slot.full(torch.cat(parts)).reshape(piece.whole)

    by_rank = everybodys(what, pieces, lambda: list(local()))
    return list(map(put_together, pieces, *by_rank))


def everybodys(what: str, pieces: Sequence[Part], value: Callable[[], Any]) -> list[Any]:
    of = "several parameters" if pieces[0].place == JOINED else pieces[0].slot.name
    label = f"{what} of {of}" + f" and {len(pieces) - 1} more" * (len(pieces) > 1)
    return pieces[0].coordinator.shard_values(label, value)


def plain(piece: torch.Tensor) -> torch.Tensor:
    with without_torch_function():
        return piece.detach().as_subclass(torch.Tensor).reshape(-1).clone()
