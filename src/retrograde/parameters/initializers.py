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
from torch.nn import init

from retrograde.pages import FullTensor
from retrograde.parameters.pieces import Piece

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
    for name in _ASK_FOR_SHAPES:
        setattr(init, name, _on_the_whole(getattr(init, name)))
    fans = init._calculate_fan_in_and_fan_out

    @functools.wraps(fans)
    def whole_fans(tensor: torch.Tensor) -> Any:
        return fans(torch.empty(tensor.whole, device="meta") if isinstance(tensor, Piece) else tensor)

    init._calculate_fan_in_and_fan_out = whole_fans


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
