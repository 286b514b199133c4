"""Describes trees of containers for messages, and makes them again from the description.

A description names the types of its containers. The receiver makes only containers that it knows already: types that
are registered as pytree nodes there (torch.utils._pytree: lists, tuples, dicts, dataclasses and outputs of Hugging Face
models that were registered, ...), and named tuples of modules it has imported. So a message cannot have code run.
"""

import sys
from collections import namedtuple
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from retrograde.errors import PipelineError
from retrograde.torch_internals import TreeSpec, is_named_tuple, known_containers, leaf_spec
from retrograde.transport.messages import DTYPES, Constant, Group, MessageError, Octets, TreeLeaf, TreeNode

WAY_OUT = (
    "stages may hand on tensors, numbers, texts, bytes, None, and lists, tuples, dicts and registered containers of "
    "these: register the type with torch.utils._pytree.register_pytree_node on all ranks, or hand on its parts"
)


# ---- constants
# Types of constants beside plain scalars, each with its name, how to take one apart and how to put it together.
_KINDS: dict[type, tuple[str, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    list: ("list", list, list),
    tuple: ("tuple", list, tuple),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    dict: ("dict", lambda d: [list(d.keys()), list(d.values())], lambda kv: dict(zip(*kv, strict=True))),
    complex: ("complex", lambda c: [c.real, c.imag], lambda parts: complex(*parts)),
    slice: ("slice", lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    range: ("range", lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", lambda dtype: [str(dtype)], lambda parts: DTYPES[parts[0]]),
    torch.device: ("device", lambda device: [str(device)], lambda parts: torch.device(parts[0])),
}
_MAKERS = {name: make for name, _, make in _KINDS.values()}
_PLAIN = (type(None), bool, float, str)
_LARGEST = 2**63


def describe_constant(item: Any) -> Constant:
    """Describe a constant. Its type must be one of these exactly, since a subclass may mean something else."""
    kind = type(item)
    if kind in _PLAIN:
        return item  # type: ignore[no-any-return]
    if kind is int:
        return item if -_LARGEST <= item < _LARGEST else Group("int", [hex(item)])
    if kind is bytes:
        return Octets(item)
    if kind not in _KINDS:
        raise PipelineError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another stage: {WAY_OUT}")
    name, take_apart, _ = _KINDS[kind]
    return Group(name, [describe_constant(part) for part in take_apart(item)])


def constant_of(description: Constant) -> Any:
    if isinstance(description, Octets):
        return description.data
    if not isinstance(description, Group):
        return description
    parts = [constant_of(part) for part in description.items]
    if description.kind == "int":
        return int(parts[0], 16)
    if description.kind not in _MAKERS:
        raise MessageError(f"{description.kind!r} is not a kind of constant")
    return _MAKERS[description.kind](parts)


# ---- containers
_FACTORIES: dict[str, type | None] = {
    "None": None,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}
_DEFAULTDICT = "collections.defaultdict"
_NAMEDTUPLE = "collections.namedtuple"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(spec: TreeSpec) -> TreeLeaf | TreeNode:
    if spec.is_leaf():
        return TreeLeaf()
    children = [describe(child) for child in spec.children()]
    kind = spec.type
    if kind is namedtuple:
        context: Constant = _described_namedtuple(spec.context)
    elif _name(kind) == _DEFAULTDICT:
        context = Group("list", [_described_factory(spec.context[0]), describe_constant(spec.context[1])])
    else:
        context = describe_constant(spec.context)
    return TreeNode(_NAMEDTUPLE if kind is namedtuple else _name(kind), context, children)


def spec_of(description: TreeLeaf | TreeNode) -> TreeSpec:
    """Make a tree from its description. Raises `MessageError` for a type that this process does not know."""
    if isinstance(description, TreeLeaf):
        return leaf_spec()
    children = [spec_of(child) for child in description.children]
    if description.name == _NAMEDTUPLE:
        return TreeSpec(namedtuple, _known_namedtuple(description.context), children)
    kind = _known_node(description.name)
    context = constant_of(description.context)
    if description.name == _DEFAULTDICT:
        context = [_known_factory(context[0]), context[1]]
    return TreeSpec(kind, context, children)


def _known_node(name: str) -> type:
    for kind in known_containers():  # if two have one name, the one defined last comes first
        if kind is not namedtuple and _name(kind) == name:
            return kind
    raise MessageError(
        f"a {name} came from another stage and is not registered as a pytree node on this rank: {WAY_OUT}"
    )


def _described_namedtuple(kind: type) -> Constant:
    if _find(kind.__module__, kind.__qualname__) is not kind:
        raise PipelineError(
            f"the named tuple {_name(kind)} cannot be found by its name, so it cannot be sent to another stage: define "
            f"it at the top of a module"
        )
    return Group("tuple", [kind.__module__, kind.__qualname__])


def _known_namedtuple(context: Constant) -> type:
    named = constant_of(context)
    if isinstance(named, tuple) and len(named) == 2 and all(isinstance(part, str) for part in named):
        kind = _find(*named)
        if isinstance(kind, type) and is_named_tuple(kind):
            return kind
    raise MessageError(f"{named!r} came from another stage and is not a named tuple of a module imported on this rank")


def _find(module: str, name: str) -> Any:
    """Find a name in a module that has been imported; nothing is imported for it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, type | ModuleType):
            return None
        found = vars(found).get(part)
    return found


def _described_factory(factory: Any) -> str:
    for name, kind in _FACTORIES.items():
        if factory is kind:
            return name
    raise PipelineError(
        f"a defaultdict of {factory!r} cannot be sent to another stage; hand on dict(...) of it, or one of "
        f"{', '.join(_FACTORIES)}"
    )


def _known_factory(name: Any) -> type | None:
    if isinstance(name, str) and name in _FACTORIES:
        return _FACTORIES[name]
    raise MessageError(f"a defaultdict of {name!r} came from another stage")
