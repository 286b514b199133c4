"""Saved tensors as handles: what autograd keeps of a page is where to find it again.

[Note: saved tensors]
While a sharded module computes, saved-tensor hooks replace every tensor that aliases a page by a handle and
leave the rest alone. Unpacking pages it in again, whoever asks and however often. That is all a retained
graph, a second backward, a backward by hand, an exception or a skipped frame needs.

Rule 1: hooks that were active outside (checkpointing, save_on_cpu, the user's own) keep seeing every tensor
        that is not of a page: ours call theirs.
Rule 2: hooks replace autograd's version check, so ours make that check themselves.
Rule 3: a weight that was cast to a lower precision, as autocast does, is found again by its page and the dtype: no
        cast of a weight stays between forward and backward. That of a trained one is known by its node. That of a
        frozen one is in no graph; where pages go it is known by its values, on the host: on a device the host would
        have to wait for them.
Rule 4: where torch forbids hooks (torch.func.grad) there are none; the graph then holds the page itself.
"""

import bisect
import operator
from collections.abc import Callable
from functools import partial

import torch

from retrograde.pages.pager import Pager
from retrograde.pages.unit import Unit
from retrograde.torch_internals import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_forbidden,
    storage_id,
    top_saved_tensor_hooks,
    version_of,
    what_was_cast,
)

_LOWER = (torch.bfloat16, torch.float16)
# torch's own words, so that what searches for them finds them
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{}] is at version {}; expected version {} instead."
)


class SavedTensors:
    """The pack and unpack hooks of one engine. What they leave in a graph is a call that makes a tensor again."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._gathers: dict[object, Unit] = {}  # of wide units, by the nodes whose outputs their full tensors are
        self.compiled = False  # compiled code is running: it edits full tensors without telling their unit

    def watch(self, unit: Unit) -> None:
        """Recognize casts of a unit's full tensors from now on. These are in their graph by now."""
        node = unit.page.full_tensors[0].grad_fn
        if node is not None and unit.layout.dtype not in _LOWER:
            self._gathers[node] = unit

    def enter(self) -> bool:
        """Activate the hooks; False (and nothing to leave) where they are active, useless or forbidden."""
        if not torch.is_grad_enabled() or saved_tensor_hooks_forbidden():
            return False
        pack, unpack = top_saved_tensor_hooks() or (_keep, _kept)
        if getattr(pack, "of", None) is self:
            return False

        def packed(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            return self._handle(tensor) or partial(unpack, pack(tensor))

        packed.of = self  # type: ignore[attr-defined]
        push_saved_tensor_hooks(packed, operator.call)
        return True

    leave = staticmethod(pop_saved_tensor_hooks)

    def _handle(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """The handle of a tensor that aliases a page, or is a cast of one; None for any other."""
        unit = self.unit_of(tensor)
        if unit is None:
            return self._handle_of_cast(tensor) if tensor.dtype in _LOWER else None
        if tensor.dtype is not unit.layout.dtype:
            return None
        if self.compiled:
            unit.write_back_edits()
        return Handle(self._pager, unit, tensor)

    def _handle_of_cast(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """The handle of a cast of a full tensor, or of a view of one; None for any other."""
        if not tensor.requires_grad:
            return self._handle_of_frozen_cast(tensor)
        if not self._gathers:
            return None
        source = what_was_cast(tensor)
        unit = None if source is None else self._gathers.get(source.node)
        if source is None or unit is None or unit.page.full_tensors[source.number].device != tensor.device:
            return None
        return CastHandle(self._pager, unit, tensor, source.number)

    def _handle_of_frozen_cast(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """The handle of a cast of a frozen parameter of the unit in use, or of a view of one, known by its values;
        None for any other."""
        unit = self._pager.current
        if unit is None or unit.stays or unit.layout.dtype in _LOWER or not (unit.page.ready and unit.valid):
            return None
        memory = _whole_memory(tensor)
        if memory is None:
            return None
        for number, slot in enumerate(unit.layout.slots):
            alike = slot.numel == memory.numel() and not unit.trained[number]
            if alike and _is_cast(unit.page.memory[slot.offset : slot.end], memory):
                return CastHandle(self._pager, unit, tensor, number)
        return None

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit whose page a tensor lies in."""
        return self._pager.unit_of(storage_id(tensor)) if tensor.layout is torch.strided else None


class Handle:
    """Where a saved view of a page is found again, at the same version."""

    __slots__ = ("__weakref__", "_offset", "_pager", "_size", "_slot", "_stride", "_unit", "_version")

    def __init__(self, pager: Pager, unit: Unit, tensor: torch.Tensor, slot: int | None = None) -> None:
        """`slot`: the number of its parameter, if its place in the page does not say so."""
        self._pager = pager
        self._unit = unit
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset())
        self._slot = bisect.bisect_right(unit.layout.offsets, self._offset) - 1 if slot is None else slot
        self._version = version_of(unit.pieces[self._slot])
        if not unit.trained[self._slot]:
            unit.frozen_handles.add(self)

    def __call__(self) -> torch.Tensor:
        unit = self._unit
        now = version_of(unit.pieces[self._slot])
        if now != self._version:
            raise RuntimeError(
                _MODIFIED.format(f"parameter {unit.layout.slots[self._slot].name}", now, self._version)
                + " Hint: an optimizer step or an edit of the weights came between forward and backward of this graph"
            )
        self._pager.open(unit)
        with torch.no_grad():
            return self._memory().as_strided(self._size, self._stride, self._offset)

    def _memory(self) -> torch.Tensor:
        """The memory of which the saved tensor was a view, in a page that is ready."""
        return self._unit.page.memory


class CastHandle(Handle):
    """Where a cast of a full tensor, or a view of that cast, is found again: it is cast again."""

    __slots__ = ("_dtype",)

    def __init__(self, pager: Pager, unit: Unit, tensor: torch.Tensor, slot: int) -> None:
        super().__init__(pager, unit, tensor, slot)
        self._dtype = tensor.dtype

    def _memory(self) -> torch.Tensor:
        """The parameter, cast again, in the order in which it lies in memory, as the first cast was."""
        place = self._unit.layout.slots[self._slot]
        return self._unit.page.memory[place.offset : place.end].to(self._dtype)


_BEGINNING = 16  # elements; other weights of the same size differ there


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """All of the host's memory of which a tensor is a view, in one dimension; None if it has no such memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((numel,), (1,), 0)


def _is_cast(weight: torch.Tensor, memory: torch.Tensor) -> bool:
    """Is this memory the weight, cast to the memory's dtype, bit for bit?"""
    for length in (_BEGINNING, memory.numel()):
        again = weight[:length].to(memory.dtype)
        if not torch.equal(again.view(torch.int16), memory[:length].view(torch.int16)):
            return False
    return True


def _keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keep a tensor that is not of a page, as an alias (the tensor itself could close a cycle with its own node)."""
    return tensor.detach(), version_of(tensor)


def _kept(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = kept
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(_MODIFIED.format(f"{tensor.type()} {list(tensor.size())}", now, version))
    return tensor
