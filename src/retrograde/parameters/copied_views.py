"""Views of some elements of a gradient or of an optimizer's state: `p.grad[0]`, `p.grad.T`.

[Note: views of copies]
This rank has a piece of the elements, so such a view is one of a copy of the whole, which the ranks have put together.

Rule 1: an edit of the view (`p.grad[0] *= 2`) edits the sharded tensor too. The ranks make it together: they bring the
        copy up to date and edit it, and each rank keeps its piece of the result.
Rule 2: torch refuses what would write to the view unseen (`out=`, lists of tensors): the copy is an inference tensor.
Rule 3: in torch a view shows every later change of its tensor. A view of a copy does not, so to read one whose tensor
        has changed since raises.
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
    """The copy of the whole of `part` that several views share."""

    def __init__(self, part: Part, full: torch.Tensor) -> None:
        self.part = part
        self.full = full
        self._version = version_of(part)

    def edit(self, func: Callable[..., Any], name: str, view: "CopiedView", args: Any, kwargs: dict[str, Any]) -> None:
        """Apply an edit of a view to the copy and to the sharded tensor (Rule 1)."""
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
        """Raise if the sharded tensor has changed since the copy was made or edited (Rule 3)."""
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
    """Raise if one of these values is a view of a copy that is out of date."""
    for value in values:
        if isinstance(value, CopiedView):
            value._copied.check()
        elif isinstance(value, list | tuple):
            check_views(value)


def view_of_copy(view: Callable[..., Any], name: str, part: Part, *args: Any) -> Any:
    """Apply the function `view` to a copy of the whole of `part`."""
    with torch.inference_mode():  # Rule 2
        full, *rest = wholes([part, *args], name)
        found = view(full, *rest)
    return _viewing(found, _Copy(part, full))


def _viewing(found: Any, copied: _Copy) -> Any:
    """Make views of the copy, in lists too, `CopiedView`s that know it. What a mask or indices picked is no view."""
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
