"""What travels between stages: the tensors of any pytree, and a layout that says how to put it together again."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorLayout:
    """A tensor as it is made again on the other side. Memory order is kept, since kernels choose by it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> "TensorLayout":
        stride = tensor.stride() if _dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        return TensorLayout(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Layout:
    """`constants` are the leaves that are not tensors; at a tensor's place stands None in `constants`."""

    spec: TreeSpec
    tensors: tuple[TensorLayout | None, ...]
    constants: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # The tree itself travels, without its tensors: containers know how to be pickled, specs of them do not.
        return _rebuild, (tree_unflatten(self.constants, self.spec), self.tensors)


@dataclass(frozen=True)
class Parcel:
    layout: Layout
    tensors: list[Tensor | None]  # None where the leaf is not a tensor

    @staticmethod
    def of(tree: Any) -> "Parcel":
        leaves, spec = tree_flatten(tree)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
        layouts = tuple(None if tensor is None else TensorLayout.of(tensor) for tensor in tensors)
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Parcel(Layout(spec, layouts, constants), tensors)

    def tree(self, tensors: list[Tensor | None] | None = None) -> Any:
        """The pytree, with other tensors in the same places if given."""
        chosen = self.tensors if tensors is None else tensors
        leaves = [c if t is None else t for t, c in zip(chosen, self.layout.constants, strict=True)]
        return tree_unflatten(leaves, self.layout.spec)

    def apart(self) -> "Parcel":
        """The same memory without a graph. Microbatches are slices of one tensor, whose changes would count for all.

        The layout still says which of them require gradients."""
        alone = [None if t is None else torch.ops.aten._unsafe_view(t.detach(), t.shape) for t in self.tensors]
        return Parcel(self.layout, alone)

    def copied(self) -> "Parcel":
        """What a stage on another rank would receive: the same values in memory of its own."""
        made = [
            None if layout is None or tensor is None else layout.empty(tensor.device).copy_(tensor.detach())
            for layout, tensor in zip(self.layout.tensors, self.tensors, strict=True)
        ]
        return Parcel(self.layout, list(made))


def _rebuild(skeleton: Any, tensors: tuple[TensorLayout | None, ...]) -> Layout:
    constants, spec = tree_flatten(skeleton)
    return Layout(spec, tensors, tuple(constants))


def as_sent(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in memory order, one-dimensional; a copy only if it has gaps or overlaps."""
    tensor = tensor.detach()
    if not _dense(tensor):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _dense(tensor: Tensor) -> bool:
    """Does each element have its own place, with no place between them?"""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
