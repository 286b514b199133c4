"""What each torch function means on a sharded tensor: a table.

`row()` is the table: a function's name gives its route. torch itself knows most of it (which functions are pointwise,
which return views), so only exceptions are listed. Unknown functions go through the whole tensor: slow is better than
wrong.

`route()` looks at the arguments too, by these rules, first to last:

Rule 1: a function that autograd records computes with the full tensor, in its graph.
Rule 2: a function that writes to a plain tensor gets the wholes of what is sharded. An operator that writes to what is
        sharded, and does not say so by its name (`mul_`), is refused: a custom one with `mutates_args`, a fused update.
Rule 3: a call that does not fit the shape of the sharded tensor (a larger tensor beside it, a sum along a dimension, a
        view of some elements) goes through the whole tensor.
"""

import functools
from collections.abc import Callable, Iterator
from enum import Enum
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from retrograde.pages import RESHAPES, edits, views
from retrograde.parameters.part import Part, parts_in
from retrograde.torch_internals import get_requires_grad, overloads, returns_of, without_torch_function, written_unseen


class Route(Enum):
    """Where a function is served (handlers.py), and what that means."""

    MEMORY = "torch's own function, on this rank's memory or on the object itself"
    SHAPE = "answered by the whole's shape"
    ELEMENTS = "on this rank's piece; the result is sharded"
    LIKE = "a new sharded tensor of the same shape"
    CONVERTED = "this rank's piece, as another dtype; what it is converted like is only looked at"
    DRAWN = "drawn for the whole, as on one device; each rank keeps its piece"
    RESHAPED = "the same memory under another shape, still sharded"
    REDUCED = "every rank's part of the answer, put together: no piece travels"
    WHOLE = "on the full tensor, on every rank; the result is plain"
    IN_GRAPH = "recorded by autograd: on the full tensor, in its graph"
    EDIT = "on this rank's piece, in place; a parameter passes the fence first"
    EDIT_WHOLE = "on the full tensor; each rank keeps its piece of what it has become"
    INTO_PLAIN = "a plain tensor is written to: with the wholes"
    OUT = "computed without `out`, then copied there"
    LISTS = "row by row: on pieces, in one call"
    REDUCED_LISTS = "as REDUCED, for all tensors of a list in one meeting"
    UNSCALED = "on pieces; inf on one rank is inf on all"
    GRADIENTS = "torch.autograd.grad: what it returns for a parameter is sharded"
    REFUSED = "about a tensor's memory, which here is a piece: an error with a name"


# ---- the exceptions
ROWS: dict[str, Route] = {}


def _rows(route: Route, names: str) -> None:
    ROWS.update(dict.fromkeys(names.split(), route))


_rows(Route.SHAPE, "size stride numel nelement dim ndimension __len__ is_contiguous is_same_size dim_order")
_rows(Route.ELEMENTS, "float double half bfloat16 int long bool byte short char type cpu contiguous clone")
_rows(Route.ELEMENTS, "isclose isreal nan_to_num float_power fill masked_fill copysign real imag conj resolve_conj")
_rows(Route.ELEMENTS, "cfloat cdouble chalf cuda xpu ipu mtia pin_memory")
_rows(Route.RESHAPED, "__getitem__ detach view reshape flatten ravel view_as reshape_as unsqueeze squeeze unflatten")
_rows(Route.REDUCED, "sum mean any all max min amax amin count_nonzero norm linalg_vector_norm linalg_norm")
_rows(Route.REDUCED_LISTS, "_foreach_norm _foreach_max")
_rows(
    Route.WHOLE, "item equal allclose is_nonzero unique unique_consecutive numpy tolist __array__ __contains__ __iter__"
)
_rows(Route.WHOLE, "__float__ __int__ __bool__ __complex__ __index__ __format__ view_as_real view_as_complex")
_rows(Route.WHOLE, "__dlpack__ argmax argmin tensor as_tensor asarray")
_rows(Route.CONVERTED, "to type_as")
_rows(Route.DRAWN, "normal_ uniform_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_ random_")
_rows(Route.DRAWN, "rand_like randn_like randint_like")
_rows(Route.EDIT, "copy_ zero_ fill_ masked_fill_")
_rows(Route.MEMORY, "backward detach_ requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook")
_rows(Route.MEMORY, "data_ptr const_data_ptr untyped_storage storage storage_type share_memory_ is_shared is_pinned")
_rows(Route.MEMORY, "__repr__ __deepcopy__ __reduce_ex__ __setstate__ __dlpack_device__ _is_view rename_ module_load")
_rows(
    Route.MEMORY, "_clear_non_serializable_cached_data element_size get_device record_stream storage_offset is_set_to"
)
_rows(Route.REFUSED, "as_strided")
_rows(Route.UNSCALED, "_amp_foreach_non_finite_check_and_unscale_")
_rows(Route.GRADIENTS, "grad")

ATTRIBUTES = {
    **dict.fromkeys(("shape", "ndim", "nbytes", "names"), Route.SHAPE),
    **dict.fromkeys(("T", "mT", "H", "mH"), Route.WHOLE),
    **dict.fromkeys(("real", "imag"), Route.ELEMENTS),
}
# Other names of functions, and the name under which torch knows them (as pointwise, for instance).
_SPELLINGS = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "divide": "div",
    "fix": "trunc",
    "floor_divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "rdiv": "div",
    "rpow": "pow",
    "rmod": "remainder",
    "mod": "remainder",
    "floordiv": "div",
    "rfloordiv": "div",
    "truediv": "div",
    "rtruediv": "div",
    "radd": "add",
    "rmul": "mul",
    "invert": "bitwise_not",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "__rand__": "bitwise_and",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__rlshift__": "bitwise_left_shift",
    "__rrshift__": "bitwise_right_shift",
}


# ---- the table
@functools.cache
def row(name: str) -> Route:
    """The route of a function or method of this name."""
    if name in ROWS:
        return ROWS[name]
    if name.startswith("_foreach_"):
        return Route.LISTS
    if name in RESHAPES:
        return Route.REFUSED
    if edits(name):
        return Route.EDIT if _pointwise(_bare(name, in_place=True)) else Route.EDIT_WHOLE
    if name.endswith("_like"):
        return Route.LIKE
    if name.startswith("new_"):
        return Route.MEMORY
    if _pointwise(_bare(name)):
        return Route.ELEMENTS
    known = overloads(_bare(name))
    describes = known and not views(name) and not any(_returns_tensors(overload) for overload in known)
    return Route.MEMORY if describes else Route.WHOLE


def _bare(name: str, in_place: bool = False) -> str:
    """The name under which torch knows most about a function: `mul` for `__imul__` and `mul_`."""
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    bare = name.strip("_")
    if in_place and name.startswith("__i"):
        bare = bare[1:]
    return _SPELLINGS.get(bare, bare)


def _pointwise(name: str) -> bool:
    """Does torch say that each element of the result comes from one element of each argument?"""
    return any(torch.Tag.pointwise in overload.tags for overload in overloads(name))


def _returns_tensors(overload: Any) -> bool:
    returned = returns_of(overload)
    return bool(returned) and "Tensor" in str(returned[0].type) and returned[0].alias_info is None


def row_of(func: Callable[..., Any]) -> Route:
    """The route of a function as torch hands it to `__torch_function__`."""
    name = name_of(func)
    if name in ("__get__", "__set__", "__delete__"):
        attribute: str = func.__self__.__name__  # type: ignore[attr-defined]
        return ATTRIBUTES.get(attribute, Route.MEMORY)
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        return Route.MEMORY  # outside.py refuses sharded tensors there
    return row(name)


def name_of(func: Callable[..., Any]) -> str:
    """A function's name; of an operator (`torch.ops.aten.mul_.Tensor`) without its overload's."""
    return getattr(func, "__name__", "").partition(".")[0]


# ---- the arguments
class Call(NamedTuple):
    """A function of torch, about to run with something sharded among its arguments."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: list[Part]

    @staticmethod
    def of(func: Callable[..., Any], args: Any, kwargs: Any) -> "Call":
        kwargs = dict(kwargs or {})
        if not args and (first := [name for name in _FIRST if name in kwargs]):
            args = (kwargs.pop(first[0]),)
        if kwargs.pop("inplace", False):  # functions in torch.nn.functional have it
            kwargs["out"] = args[0]
        name = name_of(func)
        return Call(func, name, tuple(args), kwargs, list(parts_in((*args, *kwargs.values()))))

    @property
    def first(self) -> Part:
        return self.parts[0]

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, torch.Tensor))

    @property
    def recorded(self) -> bool:
        return torch.is_grad_enabled() and any(map(get_requires_grad, self.tensors))


# Names of a first argument. Of two that a function has (`where(condition, input)`, `dot(input, tensor)`), the first one
# is before the other here.
_FIRST = ("condition", "sorted_sequence", "input", "self", "tensor", "tensors", "data", "obj")
_FIXED = {Route.MEMORY, Route.SHAPE, Route.LIKE, Route.REFUSED, Route.UNSCALED, Route.GRADIENTS}
# Routes of calls whose first argument is plain: the sharded one only gives a shape or a dtype.
_OF_THE_FIRST = {Route.RESHAPED: Route.SHAPE, Route.CONVERTED: Route.MEMORY}


def route(call: Call) -> Route:
    """Where this call is served."""
    found = row_of(call.func)
    if found in _FIXED:
        return found
    if found in _OF_THE_FIRST and not isinstance(call.args[0], Part):
        return _OF_THE_FIRST[found]
    if (written := written_unseen(call.func)) is not None:
        touched = next(parts_in(written.of(call.args, call.kwargs)), None)
        return Route.INTO_PLAIN if touched is None else Route.REFUSED
    if call.kwargs.get("out") is not None:
        return Route.OUT
    if edits(call.name):
        return _edit_route(found, call)
    with without_torch_function():
        if call.name != "detach" and call.recorded:
            return Route.IN_GRAPH
    return found if found not in _FITTING or _FITTING[found](call) else Route.WHOLE


def _edit_route(found: Route, call: Call) -> Route:
    if found is Route.LISTS:
        return found
    if not isinstance(call.args[0], Part):
        return Route.INTO_PLAIN
    if call.name == "__setitem__" and _everything(call.args[1]):
        return Route.EDIT
    if found is Route.EDIT and not _fit_elements(call):
        return Route.EDIT_WHOLE
    return found


def _everything(index: Any) -> bool:
    """Does the index pick all elements: `[...]` or `[:]`?"""
    return isinstance(index, EllipsisType) or (isinstance(index, slice) and index == slice(None))


# ---- Rule 3
def _fit_elements(call: Call) -> bool:
    """Have all tensors the shape of the first sharded one, or a shape that torch expands to it?"""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return False  # `where(condition)` asks for positions
    shape = call.first.shape
    return all(_spreads(tensor, shape) for tensor in call.tensors)


def _spreads(tensor: torch.Tensor, over: torch.Size) -> bool:
    own = tensor.shape
    if len(own) > len(over):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(own), reversed(over), strict=False))


def _fit_reduction(call: Call) -> bool:
    """Does the call ask for one number about all of one sharded tensor?"""
    if "norm" in call.name:
        named = [value for name, value in call.kwargs.items() if name not in ("p", "ord", "dtype")]
        along = [value for value in (*call.args[2:], *named) if value is not None and value is not False]
        return not along and _is_order(norm_order(call), call)
    return len(call.args) == 1 and not call.kwargs


def norm_order(call: Call) -> Any:
    """The order of the norm that the call asks for, as the caller gave it."""
    return call.args[1] if len(call.args) > 1 else call.kwargs.get("p", call.kwargs.get("ord"))


def _is_order(order: Any, call: Call) -> bool:
    """Is it the order of a norm over all elements? With an order, `linalg.norm` of a matrix is a matrix norm."""
    if call.name == "linalg_norm" and order is not None and call.first.dim() > 1:
        return False
    return order is None or order == "fro" or (isinstance(order, int | float) and order >= 0)


def _fit_shape(call: Call) -> bool:
    """Does the call keep all elements as they are, and only give them another shape?"""
    if call.name == "__getitem__":
        return _everything(call.args[1])
    return not any(isinstance(value, torch.dtype) for value in call.args[1:])


_FITTING: dict[Route, Callable[[Call], bool]] = {
    Route.ELEMENTS: _fit_elements,
    Route.REDUCED: _fit_reduction,
    Route.RESHAPED: _fit_shape,
}
