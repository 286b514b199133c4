"""Makes sharded arguments of a function whole."""

from collections.abc import Sequence
from typing import Any

import torch

from retrograde.parameters.part import Part, together
from retrograde.torch_internals import get_requires_grad, tree_flatten, tree_unflatten, without_torch_function


def wholes(args: Sequence[Any], name: str) -> list[Any]:
    """Return `args` with the whole in place of each sharded tensor, in at most one meeting for all of them.

    A parameter becomes its full tensor, a parameter view a view of the full tensor. A tensor in a graph stays in it.
    With offload, full tensors are on the device, and so are other wholes if there is one among them."""
    leaves, spec = tree_flatten(list(args))
    found = {id(part): part for part in leaves if isinstance(part, Part)}
    made: dict[int, torch.Tensor] = {}
    apart: list[Part] = []
    for part in found.values():
        if part.of_weights:
            made[id(part)] = part.full_tensor()
        elif torch.is_grad_enabled() and _in_graph(part):
            made[id(part)] = regathered(part)
        else:
            apart.append(part)
    if apart:
        gathered = together(name, apart, lambda: [plain(part) for part in apart])
        made.update(zip(map(id, apart), gathered, strict=True))  # type: ignore[arg-type]
    weight = next((made[id(part)] for part in found.values() if part.of_weights), None)
    if weight is not None:
        made = {key: tensor.to(weight.device) for key, tensor in made.items()}
    return tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)  # type: ignore[no-any-return]


def whole(part: Part, what: str) -> torch.Tensor:
    """The whole of one sharded tensor."""
    return wholes([part], what)[0]  # type: ignore[no-any-return]


def plain(part: torch.Tensor) -> torch.Tensor:
    """A plain copy of this rank's piece, to be sent."""
    with without_torch_function():
        return part.detach().as_subclass(torch.Tensor).reshape(-1).clone()


def regathered(part: Part) -> torch.Tensor:
    """Gather the whole of a gradient that is part of a graph, in that graph."""
    with without_torch_function():
        piece = part.as_subclass(torch.Tensor)
        return part.owner.regather(part.place, piece).reshape(part.shape)


def _in_graph(part: Part) -> bool:
    with without_torch_function():
        return get_requires_grad(part)
