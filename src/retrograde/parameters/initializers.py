"""`torch.nn.init` on sharded parameters.

Most initializers draw elementwise and need nothing. Some ask for the parameter's shape (fans, rows and columns), and
that of a piece is not it. They are run on a tensor in the shape of the whole, as the engine's random numbers are
(pieces.py): ranks with one seed draw one tensor, and each keeps its piece.

They are wrapped in torch's module, once for the process. Who imported one by its name before that still gets whole
fans, for which torch looks in its module; the others then find a piece and say so (`Part.ndimension`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from retrograde.pages import FullTensor
from retrograde.parameters.pieces import Piece
from retrograde.torch_internals import before_counting_fans, replace_initializers

_ASK_FOR_SHAPES = (
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "orthogonal_",
    "sparse_",
    "xavier_normal_",
    "xavier_uniform_",
)


@functools.cache
def serve_initializers() -> None:
    """Wrap them, once for the process."""
    replace_initializers(_ASK_FOR_SHAPES, _on_the_whole)
    before_counting_fans(lambda tensor: _blank_whole(tensor) if isinstance(tensor, Piece) else tensor)


def _blank_whole(piece: Piece) -> torch.Tensor:
    return torch.empty(piece.whole, device="meta")


def _on_the_whole(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Piece):
            scratch = tensor.slot.full(tensor.new_empty(tensor.slot.numel))
        elif isinstance(tensor, FullTensor):
            scratch = torch.empty_like(tensor)
        else:
            return initialize(tensor, *args, **kwargs)
        initialize(scratch, *args, **kwargs)
        with torch.no_grad():
            tensor.copy_(scratch)
        return tensor

    return run
