"""Payloads, which travel between stages: the tensors of a pytree, and a layout by which it is put together again."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from retrograde.layout import is_dense, row_by_row
from retrograde.pipeline.trees import constant_of, describe, describe_constant, spec_of
from retrograde.torch_internals import TreeSpec, alias_without_base, leaf_spec, tree_flatten, tree_unflatten
from retrograde.transport.messages import Form, MessageError, TensorLayout, TreeForm
from retrograde.transport.tensors import copy_of

_REMEMBERED = 1024  # cached layouts: enough for a few models, whose messages are the same in every step


def layout_of(tensor: Tensor) -> TensorLayout:
    """The layout in which the receiver makes a tensor: with the same strides, or row by row if it is not dense."""
    return _layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_cpu)


@lru_cache(_REMEMBERED)
def _layout(
    size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, on_host: bool
) -> TensorLayout:
    chosen = stride if is_dense(size, stride) else row_by_row(size)
    return TensorLayout(tuple(size), tuple(chosen), dtype, requires_grad, on_host)


@dataclass(frozen=True)
class TreeLayout:
    """A tree without its tensors. `constants` has the leaves that are not tensors, and None in place of each tensor.

    `share`: of the step's samples, what the microbatch is. The first stage's rank counts them, since the last stage,
    which weighs losses, may know neither from its input nor from its target how many there are."""

    spec: TreeSpec
    tensors: tuple[TensorLayout | None, ...]
    constants: tuple[Any, ...]
    share: float

    @cached_property
    def form(self) -> Form:
        """The layout as it travels in a message."""
        tree = TreeForm(describe(self.spec), [describe_constant(constant) for constant in self.constants], self.share)
        return Form(self.tensors, tree)


@lru_cache(_REMEMBERED)
def _alone(layout: TensorLayout, share: float) -> TreeLayout:
    """The tree layout of a single tensor, as it goes between most stages."""
    return TreeLayout(leaf_spec(), (layout,), (None,), share)


@dataclass(frozen=True)
class Payload:
    """The tensors of a pytree, and how it is put together again."""

    layout: TreeLayout
    tensors: list[Tensor | None]  # None where the leaf is not a tensor

    @staticmethod
    def of(tree: Any, share: float = 1.0) -> "Payload":
        if type(tree) is Tensor:
            return Payload(_alone(layout_of(tree), share), [tree])
        leaves, spec = tree_flatten(tree)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
        layouts = tuple(None if tensor is None else layout_of(tensor) for tensor in tensors)
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Payload(TreeLayout(spec, layouts, constants, share), tensors)

    def tree(self, tensors: list[Tensor | None] | None = None) -> Any:
        """The pytree, with other tensors in the same places if given."""
        chosen = self.tensors if tensors is None else tensors
        leaves = [c if t is None else t for t, c in zip(chosen, self.layout.constants, strict=True)]
        return tree_unflatten(leaves, self.layout.spec)

    def apart(self) -> "Payload":
        """The same memory without a graph, in tensors that are no views, each with a version of its own: microbatches
        are slices of one tensor, and a change of one would count as a change of all.

        The layout still says which tensors require gradients."""
        alone = [None if t is None else alias_without_base(t.detach()) for t in self.tensors]
        return Payload(self.layout, alone)

    def copied(self) -> "Payload":
        """A copy, as a stage on another rank would receive it: the same values in other memory."""
        made = [
            None if layout is None or tensor is None else copy_of(tensor, layout, tensor.device)
            for layout, tensor in zip(self.layout.tensors, self.tensors, strict=True)
        ]
        return Payload(self.layout, list(made))


Gradients = list[Tensor | None]


def form_of(content: Payload | Gradients) -> Form:
    """The form by which another rank puts the content together again."""
    if isinstance(content, Payload):
        return content.layout.form
    return _form_of_gradients(tuple(None if grad is None else layout_of(grad) for grad in content))


@lru_cache(_REMEMBERED)
def _form_of_gradients(layouts: tuple[TensorLayout | None, ...]) -> Form:
    return Form(layouts, None)


def content_of(form: Form, tensors: list[Tensor | None]) -> Payload | Gradients:
    """Put content together from its form and tensors. Raises `MessageError` for containers unknown on this rank."""
    if form.tree is None:
        return tensors
    spec = spec_of(form.tree.root)
    constants = tuple(constant_of(constant) for constant in form.tree.constants)
    if not spec.num_leaves == len(constants) == len(tensors):
        raise MessageError(f"a tree of {spec.num_leaves} leaves came with {len(tensors)} tensors or constants")
    return Payload(TreeLayout(spec, form.tensors, constants, form.tree.share), tensors)
