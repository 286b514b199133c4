"""In which dtypes a model computes, is updated, and sends its gradients.

A parameter has two: that of its *page*, with which modules compute, and that of its *master*, the leaf that optimizers
update. Where both are the same there is one memory for it, as ever. docs/design/precision.md has the whole way of a
number.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograde.arguments import flag, shown, wrong
from retrograde.errors import ShardingError

Dtype = str | torch.dtype | None
Kept = type[nn.Module] | list[type[nn.Module]] | tuple[type[nn.Module], ...]

_NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KNOWN = (*_NAMED.values(), torch.float64)


class Dtypes(NamedTuple):
    """The dtypes of one parameter."""

    page: torch.dtype
    master: torch.dtype


@dataclass(frozen=True, repr=False)
class Precision:
    """In which dtypes a model computes, is updated, and sends its gradients. A dtype is "fp32", "bf16", "fp16" or one
    of torch's own. None leaves it as it is.

    `param`: what modules compute with, and what travels when weights do. `master`: what the optimizer updates; fp32 or
    wider if `param` is given. `reduce`: in which gradients travel (their own, if None). They are added up in fp32 or
    wider; on accelerators with `exact=False` the backend adds them up in that dtype. `accumulate`: in which a rank adds
    up gradients of several backwards before they are sent, in windows and at stage 1; that of `param` if None.

    `keep`: classes of modules that compute in the masters' dtype, norms for instance. Their floating-point arguments
    are cast to it, their results to `param`. `inputs`: cast the model's floating-point arguments to `param`. `output`:
    cast its floating-point results to this."""

    param: Dtype = None
    reduce: Dtype = None
    master: Dtype = None
    accumulate: Dtype = None
    keep: Kept = ()
    inputs: bool = True
    output: Dtype = None

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "master", "accumulate", "output"):
            _dtype(f"precision.{name}", getattr(self, name))
        kept: tuple[object, ...] = self.kept_classes
        for cls in kept:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                text = f"precision.keep: {shown(cls)} is not a module class; give classes such as nn.LayerNorm"
                raise ShardingError(text)
        flag("precision.inputs", self.inputs)

    @staticmethod
    def of(value: object) -> "Precision":
        """Read what `shard()` was given: None, a dtype or its short name, or one of these."""
        if value is None:
            return Precision()
        if isinstance(value, Precision):
            return value
        if isinstance(value, torch.dtype) or (isinstance(value, str) and value in _NAMED):
            return Precision(param=value)
        known = ", ".join(f'"{name}"' for name in _NAMED)
        raise wrong("precision", value, "is not known", f"rg.Precision(...), one of {known}, or None")

    def __repr__(self) -> str:
        """Show what was given, without what was left out."""
        given = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return f"Precision({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in given)})"

    # ---- what was said, as dtypes
    @property
    def page(self) -> torch.dtype | None:
        return _dtype("precision.param", self.param)

    @property
    def wire(self) -> torch.dtype | None:
        return _dtype("precision.reduce", self.reduce)

    @property
    def waiting(self) -> torch.dtype | None:
        return _dtype("precision.accumulate", self.accumulate)

    @property
    def result(self) -> torch.dtype | None:
        return _dtype("precision.output", self.output)

    # ---- what it comes to
    @property
    def meaning(self) -> tuple[object, ...]:
        """A value that is equal where two say the same in other words."""
        classes = [cls.__qualname__ for cls in self.kept_classes]
        master = _dtype("precision.master", self.master)
        return (self.page, self.wire, master, self.waiting, classes, bool(self.inputs), self.result)

    @property
    def kept_classes(self) -> tuple[type[nn.Module], ...]:
        return tuple(self.keep) if isinstance(self.keep, list | tuple) else (self.keep,)

    def keeps(self, module: nn.Module) -> bool:
        return isinstance(module, self.kept_classes)

    def dtypes(self, own: torch.dtype, kept: bool = False) -> Dtypes:
        """The dtypes of a parameter that had the dtype `own`. Whole and complex numbers stay what they are."""
        if not own.is_floating_point:
            return Dtypes(own, own)
        master = self._master_of(own)
        page = master if kept else self.page or own
        if torch.promote_types(page, master) != master:
            raise wrong("precision.master", master, f"cannot hold what {page} can", "a wider dtype, such as fp32")
        return Dtypes(page, master)

    def _master_of(self, own: torch.dtype) -> torch.dtype:
        said = _dtype("precision.master", self.master)
        if said is not None:
            return said
        return own if self.param is None else torch.promote_types(own, torch.float32)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    found = _NAMED.get(value) if isinstance(value, str) else value
    if value is None or found in _KNOWN:
        return found
    raise wrong(name, value, "is not known", f"{', '.join(_NAMED)}, their dtypes or torch.float64")


AS_IT_IS = Precision()
