"""Numbers about all of a tensor, made from every rank's part of the answer. All ranks ask, and all get the same number.

Sums are made in double precision (those of integers in 64 bits), in the order of the pieces, and rounded once, at the
end.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from retrograde.pages import alive
from retrograde.parameters.part import Part, everybodys, everybodys_tensors
from retrograde.parameters.routes import Call, norm_order
from retrograde.torch_internals import norms_of, without_torch_function

Number = torch.Tensor  # of no dimensions


class Reduction(NamedTuple):
    """How a rank answers for its piece (never an empty one), how two answers become one, and what the last becomes."""

    of_piece: Callable[[torch.Tensor], Number]
    combine: Callable[[Number, Number], Number]
    finish: Callable[[Number, Part], Number] = lambda number, part: number


def _wide(piece: torch.Tensor) -> torch.dtype:
    if piece.is_complex():
        return torch.complex128
    return torch.float64 if piece.is_floating_point() else torch.int64


def _rounded(number: Number, part: Part) -> Number:
    """Round a sum to the tensor's dtype. A sum of integers stays in 64 bits, as in torch."""
    kept = part.dtype.is_floating_point or part.dtype.is_complex
    return number.to(part.dtype) if kept else number


def _sum(piece: torch.Tensor) -> Number:
    return piece.sum(dtype=_wide(piece))


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_sum, torch.add, _rounded),
    "mean": Reduction(_sum, torch.add, lambda number, part: _rounded(number / part.numel(), part)),
    "count_nonzero": Reduction(torch.count_nonzero, torch.add),
    "any": Reduction(torch.any, torch.logical_or),
    "all": Reduction(torch.all, torch.logical_and),
    "max": Reduction(torch.max, torch.maximum),
    "amax": Reduction(torch.amax, torch.maximum),
    "min": Reduction(torch.min, torch.minimum),
    "amin": Reduction(torch.amin, torch.minimum),
}


def reduced(call: Call) -> Number:
    """Serve a reduction of one sharded tensor to one number."""
    if "norm" in call.name:
        (norm,) = norms([call.first], _order(norm_order(call)))
        dtype = call.kwargs.get("dtype")
        return norm if dtype is None else norm.to(dtype)
    return _reduce(REDUCTIONS[call.name], call.first, call)


def _reduce(reduction: Reduction, part: Part, call: Call) -> Number:
    def mine() -> list[Number]:
        with without_torch_function():
            piece = part.piece
            return [reduction.of_piece(piece)] if piece.numel() else []

    if part.numel() == 0:
        with without_torch_function():
            return call.func(part.piece)  # type: ignore[no-any-return]  # torch's own answer, or error
    answers = [number for numbers in everybodys(call.name, [part], mine) for number in numbers]
    return reduction.finish(functools.reduce(reduction.combine, answers), part)


# ---- norms
def _order(given: Any) -> float:
    return 2.0 if given in (None, "fro") else float(given)


def norms(parts: Sequence[Part], order: float) -> list[Number]:
    """The norms of the wholes of `parts`, in one meeting."""

    with without_torch_function():
        dtypes = [part.dtype for part in parts]

    def mine() -> torch.Tensor:
        with without_torch_function():
            return norms_of_pieces([part.piece for part in parts], order)

    found = norms_of_wholes(everybodys_tensors(f"norm {order:g}", parts, mine), order)
    if len(set(dtypes)) == 1:
        return list(found.to(dtypes[0].to_real()).unbind())
    return [norm.to(dtype.to_real()) for norm, dtype in zip(found.unbind(), dtypes, strict=True)]


def norms_of_wholes(by_rank: list[torch.Tensor], order: float) -> torch.Tensor:
    """Combine every rank's norms of its pieces into the norms of the wholes, in double precision."""
    answers = torch.stack(by_rank)
    return answers.sum(0) if order == 0 else torch.linalg.vector_norm(answers, order, dim=0)


def norms_of_pieces(pieces: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of each piece, in double precision. An empty piece has 0, which changes no norm."""
    if math.isinf(order):
        nothing = torch.zeros((), dtype=torch.double, device=pieces[0].device)
        return torch.stack([piece.abs().amax().double() if piece.numel() else nothing for piece in pieces])
    if any(piece.is_complex() for piece in pieces):
        pieces = [piece.abs() for piece in pieces]
    return torch.stack(norms_of(pieces, order, dtype=torch.double))


def reduced_lists(call: Call) -> list[Number]:
    """Serve `torch._foreach_norm` and `_foreach_max`: in one meeting if it can, otherwise tensor by tensor."""
    tensors = list(call.args[0])
    coordinators = {alive(reference).coordinator for reference in {part._owner for part in call.parts}}
    of_one_model = len(coordinators) == 1 and len(call.parts) == len(tensors)
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("ord")
    if call.name == "_foreach_max" or not of_one_model or _order(given) < 0:  # an empty piece has no such answer
        single = torch.max if call.name == "_foreach_max" else torch.linalg.vector_norm
        return [single(tensor, *call.args[1:], **call.kwargs) for tensor in tensors]
    found = norms(call.parts, _order(given))
    dtype = call.kwargs.get("dtype")
    return found if dtype is None else [norm.to(dtype) for norm in found]


def unscaled(call: Call) -> Any:
    """Serve GradScaler's check of gradients: inf on one rank is inf on all."""
    found_inf = call.args[1]
    with without_torch_function():
        result = call.func(*call.args, **call.kwargs)
    by_rank = everybodys_tensors("found_inf", [call.first], found_inf.clone)
    found_inf.copy_(functools.reduce(torch.maximum, by_rank))
    return result
