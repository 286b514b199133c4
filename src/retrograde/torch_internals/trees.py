"""Trees of containers, as torch flattens them."""

from collections import namedtuple
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from retrograde.torch_internals.probes import expect, find, probe

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec as TreeSpec
else:
    TreeSpec = find("torch.utils._pytree:TreeSpec")
"""The containers of a tree without its leaves: `type`, `context`, `children()`, `is_leaf()`, `num_leaves`."""

tree_flatten: Callable[[Any], tuple[list[Any], TreeSpec]] = find("torch.utils._pytree:tree_flatten")
tree_unflatten: Callable[[Iterable[Any], TreeSpec], Any] = find("torch.utils._pytree:tree_unflatten")
tree_leaves: Callable[[Any], list[Any]] = find("torch.utils._pytree:tree_leaves")
tree_map_only: Callable[..., Any] = find("torch.utils._pytree:tree_map_only")


leaf_spec: Callable[[], TreeSpec] = find("torch.utils._pytree:treespec_leaf")
"""The tree of one leaf."""
is_named_tuple: Callable[[type], bool] = find("torch.utils._pytree:is_namedtuple_class")


def known_containers() -> list[type]:
    """The types that are registered as containers, the last registered first."""
    return list(reversed(import_module("torch.utils._pytree").SUPPORTED_NODES))


class _NamedPair(NamedTuple):
    left: Any
    right: Any


@probe(
    "trees of containers",
    "TreeSpec",
    "tree_flatten",
    "tree_unflatten",
    "tree_leaves",
    "tree_map_only",
    "leaf_spec",
    "known_containers",
    "is_named_tuple",
    needed_for="what stages of a pipeline hand on, batches that are cut, and parameters inside arguments",
    otherwise="stages receive other containers than were sent, or a step is refused",
)
def _trees_can_be_rebuilt() -> None:
    """Assumes: `torch.utils._pytree` flattens containers into leaves and a TreeSpec of type, context and children, and
    one can be made from these three; a named tuple's type is `namedtuple` and its context its class."""
    tree = {"a": [1, _NamedPair(2, 3)], "b": (4,)}
    leaves, spec = tree_flatten(tree)
    expect(leaves, [1, 2, 3, 4], "the leaves of a tree")
    expect(tree_leaves(tree), leaves, "its leaves alone")
    expect(tree_unflatten(leaves, _rebuilt(spec)), tree, "the tree, put together again,")
    expect(tree_map_only(int, str, tree)["b"], ("4",), "what is mapped")
    pair = spec.children()[0].children()[1]
    expect([pair.type, pair.context, pair.num_leaves], [namedtuple, _NamedPair, 2], "type and context of a named tuple")
    expect([is_named_tuple(each) for each in (_NamedPair, tuple)], [True, False], "what is a named tuple")
    expect({dict, list, tuple} <= set(known_containers()), True, "whether Python's containers are known")


def _rebuilt(spec: TreeSpec) -> TreeSpec:
    if spec.is_leaf():
        return leaf_spec()
    return TreeSpec(spec.type, spec.context, [_rebuilt(child) for child in spec.children()])
