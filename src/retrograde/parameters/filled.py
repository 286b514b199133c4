"""Plain tensors that are filled from pieces: buffers of the user's own, for a momentum or a bucket of gradients.

`torch.zeros(p.shape)` has the shape of this rank's piece, and after `buffer.add_(p.grad)` it is a piece in all but
name: its norm would be this rank's own. So it becomes one.

| what is written to                          | becomes                                             |
|---------------------------------------------|-----------------------------------------------------|
| a tensor of the piece's shape               | a piece of the same parameter                       |
| a part of a vector (`flat[a:b] = p.grad`)   | the vector: pieces of several parameters            |
| a row of a matrix (`history[i] = p.grad`)   | refused: no reduction of a matrix is one of a whole |
"""

from collections.abc import Iterator
from typing import Any

import torch

from retrograde.errors import UnsupportedError
from retrograde.parameters.part import Part
from retrograde.torch_internals import base_of


class Markable(Part):
    """A piece, as far as it matters here (pieces.py)."""

    def mark(self, tensor: torch.Tensor, joined: bool = False) -> None:
        """A plain tensor that was filled from this becomes a piece, of the same parameter or of several."""
        raise NotImplementedError


def mark_filled(name: str, args: Any, kwargs: Any, pieces: list[Markable], from_gradients: bool) -> None:
    """A function that writes has read `pieces`: make what it wrote to a piece, if it is plain.

    `from_gradients`: not from parameters alone. A whole tensor may be filled from a parameter, by which it stays plain,
    and where one rank has all of a parameter the two cannot be told apart there."""
    if isinstance(args[0], Part) and kwargs.get("out") is None:
        return
    if name == "__setitem__":
        _mark_item(args[0], args[1], pieces[0], from_gradients)
        return
    for target, piece in _targets(args, kwargs, pieces):
        if type(target) is not torch.Tensor or target.shape != piece.shape:
            continue
        if piece.shape == piece.whole and not from_gradients:
            continue
        base = base_of(target)
        if base is not None:
            _mark_vector(base, piece, name)
        piece.mark(target)


def _targets(args: Any, kwargs: Any, pieces: list[Markable]) -> Iterator[tuple[Any, Markable]]:
    """What is written to, each with the piece that goes there: one, or one of each in lists of the same length."""
    out = kwargs.get("out")
    written = args[0] if out is None else out
    if not isinstance(written, list | tuple):
        yield written, pieces[0]
        return
    columns = [arg for arg in args if isinstance(arg, list | tuple) and arg is not written and len(arg) == len(written)]
    for index, target in enumerate(written):
        beside = [column[index] for column in columns if isinstance(column[index], Part)]
        if beside:
            yield target, beside[0]


def _mark_item(target: Any, where: Any, piece: Markable, from_gradients: bool) -> None:
    if type(target) is not torch.Tensor:
        return
    place = target[where]
    if place.shape != piece.shape or (piece.shape == piece.whole and not from_gradients):
        return
    if target.shape == piece.shape:
        piece.mark(target)
    else:
        _mark_vector(target, piece, "__setitem__")


def _mark_vector(base: torch.Tensor, piece: Markable, name: str) -> None:
    if type(base) is not torch.Tensor:
        return
    if base.dim() > 1 and piece.unit.layout.world > 1:
        raise UnsupportedError(
            f"rank {piece.unit.grid.rank}: {name} wrote this rank's piece of parameter {piece.slot.name} into a part "
            f"of a plain tensor of shape {tuple(base.shape)}, of which each rank would have other elements: keep "
            f"pieces in a list (p.grad.clone()), or write engine.full_grad(p) there"
        )
    if base.dim() == 1:
        piece.mark(base, joined=True)
