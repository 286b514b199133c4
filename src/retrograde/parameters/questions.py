"""Public functions for code that is given some tensor of a model: its parameter, its whole."""

import torch

from retrograde.pages import FullTensor
from retrograde.parameters.part import Part
from retrograde.parameters.wholes import whole


def parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that `module.weight` shows. Any other tensor, a parameter too, is returned as it is."""
    return tensor.leaf if isinstance(tensor, FullTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded parameter, gradient or optimizer state. Any other tensor is returned as it is.

    All ranks call it together, except for parameters."""
    return whole(tensor, "the whole") if isinstance(tensor, Part) else tensor
