"""Views of some elements of a gradient or of an optimizer's state: `p.grad[0]`, `p.grad.T`.

[Note: views of copies]
This rank has a piece of the elements, so such a view is one of a copy of the whole, which the ranks have put together.

Rule 1: an edit of the view (`p.grad[0] *= 2`) is one of what it is a view of. The ranks make it together: the copy is
        brought up to date, edited, and each rank keeps its piece of what it has become.
Rule 2: what writes to the view unseen (`out=`, lists of tensors) is refused by torch: the copy is an inference tensor.
Rule 3: in torch a view shows what its tensor has become. A copy does not, so one that is out of date is not read.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from retrograde.errors import UnsupportedError
from retrograde.pages import RESHAPES, edits, views
from retrograde.parameters.part import Part, bring_gradients, parts_in
from retrograde.parameters.wholes import wholes
from retrograde.torch_internals import storage_id, version_of, without_torch_function


class _Copy:
    """Of the whole of `part`, by all views that were made of it."""

    def __init__(self, part: Part, full: torch.Tensor) -> None:
        self.part = part
        self.full = full
        self._version = version_of(part)

    def edit(self, func: Callable[..., Any], name: str, view: "CopiedView", args: Any, kwargs: dict[str, Any]) -> None:
        """Rule 1."""
        part = self.part
        bring_gradients([part], meet=True)
        now, rest, named = wholes([part, list(args), kwargs], name)
        with torch.inference_mode(), without_torch_function():
            self.full.copy_(now)
            func(view, *rest, **named)
        with torch.no_grad(), without_torch_function():
            part.copy_(part.cut(self.full))
        self._version = version_of(part)

    def check(self) -> None:
        """Rule 3."""
        if version_of(self.part) != self._version:
            raise UnsupportedError(
                f"{self.part.called}: a view of its gradient or of what an optimizer keeps for it is used after that "
                f"has changed, and shows what was there before: take the view anew (p.grad[0])"
            )


class CopiedView(torch.Tensor):
    """A view of a copy of the whole. What is computed with it is plain."""

    _copied: _Copy

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, CopiedView) and edits(name) and name not in RESHAPES:
            first._copied.edit(func, name, first, args[1:], kwargs)
            return None if name == "__setitem__" else first
        given = (*args, *kwargs.values())
        if next(parts_in(given), None) is not None:
            return NotImplemented  # what is sharded beside it knows what to do with a plain tensor
        if name != "__get__":
            check_views(given)
        with without_torch_function():
            result = func(*args, **kwargs)
        if isinstance(first, CopiedView) and (views(name) or name == "__get__"):
            return _viewing(result, first._copied)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def check_views(values: Iterable[Any]) -> None:
    """Raises if one of these is out of date."""
    for value in values:
        if isinstance(value, CopiedView):
            value._copied.check()
        elif isinstance(value, list | tuple):
            check_views(value)


def view_of_copy(view: Callable[..., Any], name: str, part: Part, *args: Any) -> Any:
    """What `view` makes of the whole of `part`."""
    with torch.inference_mode():  # Rule 2
        full, *rest = wholes([part, *args], name)
        found = view(full, *rest)
    return _viewing(found, _Copy(part, full))


def _viewing(found: Any, copied: _Copy) -> Any:
    """Views of the copy know it, in lists too. What was picked (by a mask, by indices) is no view."""
    if isinstance(found, list | tuple):
        return type(found)(_viewing(each, copied) for each in found)
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        return found
    if storage_id(found) != storage_id(copied.full):
        return found.clone()
    with torch.inference_mode(), without_torch_function():
        seen = found.as_subclass(CopiedView)
    seen._copied = copied
    return seen
