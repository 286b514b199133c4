"""torch's functions: their bodies, some without a public name, the inputs of casts, and where autocast shares casts."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from retrograde.torch_internals.probes import When, expect, find, probe, tiny

# ---- what a function of torch does
grouped_mm: Callable[..., torch.Tensor] = find("torch:_grouped_mm")
"""What `F.grouped_mm` calls, and modes see."""


def body_of(function: Any) -> Callable[..., Any]:
    """A Python function of torch without its first check, whether a mode or a class of tensors handles it."""
    # It is asked about a tuple of tensors, and is to say no: none is callable. A function of ours would end a graph.
    names = {**function.__globals__, "has_torch_function": callable}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Names(torch.overrides.TorchFunctionMode):
    """A mode for a probe that notes the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@probe(
    "functions behind functions",
    "grouped_mm",
    "body_of",
    needed_for="weight gradients of attention modules and of experts that wait for W",
    otherwise="they are computed in I, where other ranks wait",
    when=When.FIRST_USE,
)
def _functions_have_bodies() -> None:
    """Assumes: `F.multi_head_attention_forward` asks `has_torch_function` for modes and nothing else does in it, and
    calls `F.linear` for its projections; `F.grouped_mm` calls `_grouped_mm`."""
    x, weight = tiny(4).view(1, 1, 4), tiny(16).view(4, 4)
    packed = torch.cat([weight] * 3)
    names = _Names()
    with names:
        body_of(F.multi_head_attention_forward)(
            x, x, x, 4, 2, packed, None, None, None, False, 0.0, weight, None, need_weights=False
        )
    expect(names.seen.count("linear"), 2, "how many projections of an attention a mode sees")
    expect("multi_head_attention_forward" in names.seen, False, "whether a mode sees the attention itself")
    names.seen.clear()
    with names:
        many = tiny(64).bfloat16()
        F.grouped_mm(many.view(8, 8), many.view(1, 8, 8), offs=torch.tensor([8], dtype=torch.int32, device="cpu"))
    expect(grouped_mm.__name__ in names.seen, True, "whether a mode sees the grouped product")


# ---- casts
_CAST = "ToCopyBackward0"


class Output(NamedTuple):
    """One output of a node of a graph."""

    node: Any
    number: int


def what_was_cast(tensor: torch.Tensor) -> Output | None:
    """The input of a cast, if the tensor is a cast, or a view of one, in a graph; otherwise None."""
    base = tensor if tensor._base is None else tensor._base
    node: Any = base.grad_fn
    if node is None or node.name() != _CAST:
        return None
    return Output(*node.next_functions[0])


@probe(
    "casts in a graph",
    "what_was_cast",
    needed_for="weights that autocast has cast: they are not kept between forward and backward",
    otherwise="casts of weights stay in memory as long as their graph",
    when=When.FIRST_USE,
)
def _casts_are_known() -> None:
    """Assumes: a saved tensor that autocast has cast has the node `ToCopyBackward0`, or is a view of one that has, and
    that node leads to the one that made what was cast, and says which of its outputs it was."""
    seen: list[Output | None] = []
    first, second = tiny(4, requires_grad=True).view(2, 2).unbind()
    node: Any = second.grad_fn
    weight = second.view(1, 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: seen.append(what_was_cast(saved)), lambda kept: kept):
        with torch.autocast("cpu", torch.bfloat16):
            # Of nothing: not every machine can multiply in bf16.
            F.linear(tiny(0, requires_grad=True).view(0, 2), weight)
        torch.exp(first)
    found = [each for each in seen if each is not None and each.node is weight.grad_fn]
    expect([each.number for each in found], [0], "which output of its node was cast")
    expect(what_was_cast(second.to(torch.bfloat16)), Output(node, 1), "what a cast of the second output was made of")
    expect(seen[-1], None, "what a tensor that is no cast was made of")


# ---- autocast
_sentinels: dict[torch.device, torch.Tensor] = {}


def autocast_region(device: torch.device) -> Any:
    """An object that stands for the region in which autocast shares its casts of a leaf: the same while it shares them.

    It is the node of the cast of a leaf kept for this. An empty product makes autocast cast the leaf, or find the cast
    that it has."""
    if device not in _sentinels:
        _sentinels[device] = torch.ones(1, 1, device=device, requires_grad=True)
    product: Any = torch.mm(torch.empty(0, 1, device=device), _sentinels[device]).grad_fn
    return product.next_functions[1][0]


@probe(
    "where autocast shares its casts",
    "autocast_region",
    needed_for="weight gradients under autocast that wait for W",
    otherwise="gradients of a weight that is used twice are added in another precision than torch's",
    when=When.FIRST_USE,
)
def _regions_of_autocast() -> None:
    """Assumes: autocast casts a leaf once, from entering its outermost region to leaving it, unless its cache is
    switched off; and the node of a product leads to that of the cast."""
    device = torch.device("cpu")

    def seen(**options: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16, **options):
            return [autocast_region(device) for _ in range(2)]

    first, second, apart = seen(), seen(), seen(cache_enabled=False)
    expect(first[0] is first[1], True, "whether a cast is shared in one region")
    expect(first[0] is second[0], False, "whether a cast is shared between two regions")
    expect(apart[0] is apart[1], False, "whether a cast is shared without a cache")
