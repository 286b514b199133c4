"""Pairs of an input and an output's gradient, which wait between I and W, and the nodes that W makes of them.

Pairs refer to no graph. Their tensors are kept detached, with their versions, which W checks as autograd would.

Autograd makes a gradient that nobody else refers to a leaf's `.grad` as it is, and adds the next one to it in place. It
counts references to the tensor, not to its memory, so what a pair holds may share memory with a `.grad`: it is copied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import PipelineError
from retrograde.pipeline.formulas import GradientFormulas, ParamGrads
from retrograde.pipeline.targets import SharedCast, Target
from retrograde.torch_internals import storage_id, storage_users, version_of


@dataclass(slots=True, weakref_slot=True)
class Pair:
    """What W reads of one deferrable call: its input and its output's gradient."""

    formulas: GradientFormulas
    x: Tensor
    grad: Tensor
    versions: tuple[int, int]  # of both
    targets: tuple[Target, ...]

    @staticmethod
    def of(formulas: GradientFormulas, x: Tensor, grad: Tensor, targets: tuple[Target, ...]) -> "Pair":
        return Pair(formulas, x.detach(), grad.detach(), (version_of(x), version_of(grad)), targets)

    def compute(self) -> ParamGrads:
        self._check("input", self.x, self.versions[0])
        self._check("output gradient", self.grad, self.versions[1])
        return self.formulas.param_grads(self.grad, self.x, len(self.targets) > 1)

    def _check(self, what: str, tensor: Tensor, seen: int) -> None:
        version = version_of(tensor)
        if version != seen:
            raise PipelineError(
                f"the {what} of a {type(self.formulas).__name__.lower()} ({list(tensor.shape)}) was changed in place "
                f"between I and W: it is at version {version}, I saw version {seen}; do not "
                f"write to tensors that a stage computed before the step has ended"
            )


def bytes_of(pairs: Sequence[Pair]) -> int:
    """How many bytes the pairs have, each counted once: of a storage that something else keeps, only the parts."""
    by_storage = _by_storage(pairs).values()
    return sum(min(_bytes_read(tensors), tensors[0].untyped_storage().nbytes()) for tensors in by_storage)


def add_to_gradients(pairs: list[Pair]) -> None:
    """Do W: run an ordinary backward over one node for each pair. The list is emptied on the way.

    Nodes are made in the opposite order of I, because autograd runs the youngest first: weights that are used twice are
    summed in the order in which I met them, as in an unsplit backward.
    """
    tokens = []
    casts: dict[SharedCast, Tensor] = {}
    with torch.enable_grad():
        while pairs:
            pair = pairs.pop()
            reached = [target.reached(casts) for target in pair.targets]
            token = _Waiting.apply(pair, *reached)  # type: ignore[no-untyped-call]
            if token.requires_grad:  # false if its parameters have been frozen since I
                tokens.append(token)
            del pair
    if tokens:
        torch.autograd.backward(tokens, [token.detach() for token in tokens])


class _Waiting(torch.autograd.Function):
    """The node of a pair in W. Its output carries no data; its backward makes the gradients."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.pair = pair
        return pair.grad.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Any:
        pair, ctx.pair = ctx.pair, None
        weight, bias = pair.compute()
        return (None, weight, bias) if len(pair.targets) > 1 else (None, weight)


# ---- keeping no more memory than W reads, and none that is written to
def part_from(pairs: Sequence[Pair], gradients: Iterable[Tensor]) -> None:
    """Copy output gradients that share memory with the gradient of a parameter."""
    if pairs:
        _copy_from(pairs, {storage_id(gradient) for gradient in gradients if gradient.layout is torch.strided})


def compact(pairs: Sequence[Pair]) -> None:
    """Copy views out of a larger storage that they keep alive, unless something else keeps it alive too."""
    _copy_from(pairs, _loose(pairs))


def _copy_from(pairs: Sequence[Pair], storages: set[int]) -> None:
    """Copy the tensors of pairs that are in these storages."""
    copies: dict[Any, Tensor] = {}
    for pair in pairs if storages else ():
        if storage_id(pair.x) in storages:
            pair.x = _copied(pair.x, copies)
            pair.versions = 0, pair.versions[1]
        if storage_id(pair.grad) in storages:
            pair.grad = _copied(pair.grad, copies)
            pair.versions = pair.versions[0], 0


def _loose(pairs: Sequence[Pair]) -> set[int]:
    """The storages of which pairs read only a part, and that nothing but the pairs keeps alive."""
    found = set()
    for storage, tensors in _by_storage(pairs).items():
        partly_read = _bytes_read(tensors) < tensors[0].untyped_storage().nbytes()
        if partly_read and storage_users(tensors[0]) <= len(tensors):
            found.add(storage)
    return found


def _by_storage(pairs: Sequence[Pair]) -> dict[int, list[Tensor]]:
    """The tensors of pairs, by the storage that they are in."""
    found: dict[int, list[Tensor]] = {}
    for pair in pairs:
        for tensor in (pair.x, pair.grad):
            found.setdefault(storage_id(tensor), []).append(tensor)
    return found


def _bytes_read(tensors: Sequence[Tensor]) -> int:
    """How many bytes of one storage these tensors have. Equal ones count once, others that overlap for each."""
    distinct = {(t.storage_offset(), t.size(), t.stride()): t.nbytes for t in tensors}
    return sum(distinct.values())


def _copied(view: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    """Copy a view, once for equal views. The copy's version starts at 0."""
    place = (storage_id(view), view.storage_offset(), view.size(), view.stride())
    if place not in copies:
        copies[place] = view.clone()
    return copies[place]
