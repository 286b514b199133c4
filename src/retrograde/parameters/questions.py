"""What code that is given some tensor of a model asks about it."""

import torch

from retrograde.pages import FullTensor
from retrograde.parameters.part import Part
from retrograde.parameters.wholes import whole


def parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that `module.weight` shows; any other tensor, a parameter too, is itself."""
    return tensor.leaf if isinstance(tensor, FullTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded parameter, gradient or optimizer state; any other tensor is itself.

    All ranks ask together, but for parameters."""
    return whole(tensor, "the whole") if isinstance(tensor, Part) else tensor
