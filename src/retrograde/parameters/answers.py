"""Questions about all of a parameter or gradient, answered from every rank's piece without moving the pieces.

All ranks ask, and each gets the answer for the whole.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograde.parameters.part import Part, everybodys, pieces_in
from retrograde.torch_internals import without_torch_function


def _folded(pieces: Sequence[Part], name: str, local: Callable[..., Any], combine: Callable[..., Any]) -> list[Any]:
    """`local` of each whole tensor from `local` of its pieces, in one meeting. An empty piece has no say in it."""
    with without_torch_function():
        plain = [piece.as_subclass(torch.Tensor).detach() for piece in pieces]
        by_rank = everybodys(name, pieces, lambda: [local(t) if t.numel() else None for t in plain])
        found = [[value for value in values if value is not None] for values in zip(*by_rank, strict=True)]
        return [functools.reduce(combine, f) if f else local(t) for f, t in zip(found, plain, strict=True)]


def _norms(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Of one tensor (torch calls the order `p` or `ord`) or, foreach, of many; added up in double precision, so that
    the order of adding pieces is not seen in the result's dtype."""
    many = isinstance(args[0], list | tuple)
    tensors = list(args[0]) if many else [args[0]]
    beside = [value for name, value in kwargs.items() if name not in ("p", "ord", "dtype")]
    along = not many and (len(args) > 2 or any(value is not None and value is not False for value in beside))
    given = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2))
    order = float({"fro": 2.0, None: 2.0}.get(given, given))
    if many and len({isinstance(tensor, Part) and tensor.coordinator for tensor in tensors}) > 1:
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]  # of several engines, or of none
    if along or not all(isinstance(tensor, Part) for tensor in tensors):
        return NotImplemented

    def norm(*parts: Any) -> float:
        values = parts[0].abs().double() if len(parts) == 1 else torch.tensor(parts, dtype=torch.double)
        return float(torch.linalg.vector_norm(values, order))

    wholes = _folded(tensors, f"norm {order:g}", norm, norm if order else float.__add__)
    norms = [t.new_tensor(whole, dtype=t.dtype.to_real()) for t, whole in zip(tensors, wholes, strict=True)]
    return norms if many else norms[0]


def _reduction(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Part):
        return NotImplemented
    return _folded(args, func.__name__, func, _COMBINE[func.__name__])[0]


def _found_inf(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """GradScaler's check: inf on one rank is inf on all."""
    grads, found = args[0], args[1]
    with without_torch_function():
        func(*args, **kwargs)
    if (piece := next(pieces_in(grads), None)) is not None:
        by_rank = piece.coordinator.values("found_inf", found.clone)
        found.copy_(functools.reduce(torch.maximum, by_rank))


# How the ranks' answers make the answer for the whole.
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "any": torch.logical_or,
    "all": torch.logical_and,
    "max": torch.maximum,
    "amax": torch.maximum,
    "min": torch.minimum,
    "amin": torch.minimum,
}
OVER_ALL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm"), _norms),
    **dict.fromkeys(_COMBINE, _reduction),
    "_foreach_max": lambda func, args, kwargs: [tensor.max() for tensor in args[0]],
    "_amp_foreach_non_finite_check_and_unscale_": _found_inf,
}
