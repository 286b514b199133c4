"""What a torch function reads of a piece.

| reads    | such as                                  | on a piece                                            |
|----------|------------------------------------------|-------------------------------------------------------|
| ELEMENTS | `mul`, `abs`, `isfinite`, `lerp`         | works as it is; the result is a piece again            |
| ALL      | `norm`, `sum`, `topk`, `numpy`, `t`      | would be a silent error: answered for the whole tensor |
| LOCAL    | `numel`, `size`, `zeros_like`            | plain torch on this rank's memory (the last: a piece)  |

Views are local where they leave a piece a piece (`VIEWS`), if no graph records them. Edits that ask where in the whole
an element is (`POSITIONAL`) are made on the whole, and random numbers (`DRAWS`) are drawn for the whole.

torch itself knows which of its functions are pointwise (their tag) and which are views (their schema), so there is no
list to keep. What is unknown counts as ALL: slow is better than wrong.
"""

import functools
from enum import Enum, auto
from typing import Any

import torch

from retrograde.pages import views
from retrograde.torch_internals import overloads, returns_of


class Reads(Enum):
    ELEMENTS = auto()
    ALL = auto()
    LOCAL = auto()


# Pointwise in effect though not by tag; a concatenation of pieces is a piece of the concatenation.
_ELEMENTS = {"float", "double", "half", "bfloat16", "int", "long", "bool", "type", "to", "type_as", "cpu", "contiguous"}
JOINS = {"cat", "concat", "concatenate", "hstack"}
_ELEMENTS |= {"byte", "short", *JOINS}
_ALL = {"equal", "allclose", "item", "unique", "unique_consecutive", "__getitem__", "__contains__"}
_ALL |= {"numpy", "tolist", "__array__", "__float__", "__int__", "__bool__", "__complex__", "__index__"}
VIEWS = {"detach", "view", "reshape", "flatten", "ravel", "view_as"}
# Edits in which it matters where in the whole an element is.
POSITIONAL = {"index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "put_", "renorm_", "addmm_"}
POSITIONAL |= {"scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_", "tril_", "triu_", "fill_diagonal_"}
POSITIONAL |= {"__setitem__", "cumsum_", "cumprod_", "addmv_", "addr_", "addbmm_", "baddbmm_"}
_LOCAL = {"grad", "backward", "view_as_real", "view_as_complex", *VIEWS}
DRAWS = {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_"}
DRAWS |= {"rand_like", "randn_like", "randint_like", "kaiming_uniform_"}
_SPELLINGS = {"rdiv": "div", "rpow": "pow", "rmod": "remainder", "floordiv": "floor_divide", "invert": "bitwise_not"}
_SPELLINGS |= {name: f"bitwise_{name}" for name in ("and", "or", "xor")}


@functools.cache
def reads(name: str, functional: bool = False) -> Reads:
    """`functional`: it is one of torch.nn.functional's."""
    if name in _ALL:
        return Reads.ALL
    if name in _ELEMENTS or name.startswith("_foreach_"):
        return Reads.ELEMENTS
    if name.endswith("_like") or name.startswith("new_") or name in _LOCAL:
        return Reads.LOCAL
    bare = name.strip("_")
    known = overloads(_SPELLINGS.get(bare, bare))
    if not known:  # written in Python: functionals compute, methods describe (`__len__`, `untyped_storage`)
        return Reads.ALL if functional else Reads.LOCAL
    if any(torch.Tag.pointwise in overload.tags for overload in known):
        return Reads.ELEMENTS
    return Reads.ALL if views(name) or any(_computes(overload) for overload in known) else Reads.LOCAL


def _computes(overload: Any) -> bool:
    """Makes tensors of its own: not a size."""
    returned = returns_of(overload)
    return bool(returned) and "Tensor" in str(returned[0].type) and returned[0].alias_info is None
