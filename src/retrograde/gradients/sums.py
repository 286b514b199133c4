"""The sum of several ranks' parts of a gradient."""

from collections.abc import Sequence

import torch

from retrograde.devices import Stream

Summand = Sequence[torch.Tensor]  # flat pieces of memory which, end to end, are a shard's gradient


def add_up(parts: Sequence[Summand], own: torch.Tensor, divisor: int, stream: Stream) -> None:
    """Write ((p0 + p1) + p2) + ..., in fp32 or wider and divided once, to `own`, which may be one of the parts.

    The first two parts are added without a copy if their common dtype is that precision. The sum is made in `own`
    itself if it has that precision, and no later part is read from there."""
    wide = torch.promote_types(own.dtype, torch.float32)
    dtypes = [part[0].dtype for part in parts]
    at_once = 2 if len(parts) > 1 and torch.promote_types(*dtypes[:2]) == wide else 1
    in_place = own.dtype == wide and not any(part[0] is own for part in parts[at_once:])
    total = own if in_place else stream.empty(own.numel(), wide)

    def add(own: torch.Tensor, total: torch.Tensor, *parts: torch.Tensor) -> None:
        if at_once == 2:
            torch.add(*parts[:2], out=total)
        else:
            total.copy_(parts[0])
        for part in parts[at_once:]:
            total.add_(part)
        if divisor != 1:
            total.div_(divisor)
        if not in_place:
            own.copy_(total)

    def add_all() -> None:
        for pieces in _side_by_side([[own], [total], *parts]):
            add(*pieces)

    stream.run(add_all)


def _side_by_side(parts: Sequence[Summand]) -> list[tuple[torch.Tensor, ...]]:
    """Cut all summands where the one with the most pieces is cut, and put their pieces side by side.
    The others have one piece each."""
    lengths = [piece.numel() for piece in max(parts, key=len)]
    cut = [part if len(part) == len(lengths) else part[0].split_with_sizes(lengths) for part in parts]
    return list(zip(*cut, strict=True))


def divide(own: torch.Tensor, divisor: int, stream: Stream) -> None:
    """Divide a sum in place."""
    if divisor != 1:
        stream.run(lambda: own.div_(divisor))


def copy_together(part: Summand, into: torch.Tensor, wire: torch.dtype) -> None:
    """Copy the pieces of a part into one, rounded as they would be on the wire."""
    torch.cat([piece.to(wire) for piece in part], out=into)
