"""Gradients that wait: added up on this rank, by unit, until a step, a flush or the next backward outside a window."""

import math

import torch

from retrograde.gradients.bucket import Grads, Lone
from retrograde.gradients.gradient import Gradient, GradientState, uses_of
from retrograde.gradients.keys import Keys
from retrograde.gradients.reducer import Reducer
from retrograde.gradients.window import Windows
from retrograde.layout import Policy
from retrograde.pages import Unit
from retrograde.transport import Offers


class PendingGradients:
    """Owns the gradients that wait on this rank, and says which may wait."""

    def __init__(self, policy: Policy, windows: Windows, keys: Keys, reducer: Reducer) -> None:
        self.gradients: dict[int, Gradient] = {}  # by unit
        self._policy = policy
        self._windows = windows
        self._keys = keys
        self._reducer = reducer

    # ---- what may wait
    def may_wait(self, unit: Unit) -> bool:
        """May this unit's gradient wait? In a window any may;
        until the step only one that no hook sees in its backward."""
        return bool(self._windows.open) or (self._policy.until_step and not unit.hooked)

    def admit(self, unit: Unit) -> list[int] | None:
        """The units that must go first for the gradient of `unit` to wait within the budget; None: it cannot wait."""
        waiting = self.bytes_waiting if self._windows.budget < math.inf else {}  # else all of them fit
        return self._windows.admit(unit.index, self.waiting_bytes(unit), waiting)

    def waiting_bytes(self, unit: Unit) -> int:
        """How many bytes a gradient of this unit takes while it waits."""
        return unit.layout.padded_numel * self._policy.waiting(unit.layout.dtype).itemsize

    @property
    def bytes_waiting(self) -> dict[int, int]:
        """Bytes of unreduced gradients that wait, by unit."""
        return {index: self.waiting_bytes(gradient.unit) for index, gradient in self.gradients.items()}

    # ---- what waits
    def keep(self, unit: Unit, grads: Grads, divisor: float = 1, lone: Lone = ()) -> None:
        """Add gradients to what waits for this unit."""
        if unit.index not in self.gradients:
            dtype = self._policy.waiting(unit.layout.dtype)
            self.gradients[unit.index] = self._reducer.first(unit, dtype, grads, lone)
        self.gradients[unit.index].bucket.add(grads, divisor)

    def has(self, unit: Unit) -> bool:
        """Does a gradient of this unit wait?"""
        return unit.index in self.gradients

    def waiting_for(self, unit: Unit, slot: int) -> torch.Tensor | None:
        """What waits for one parameter, as it lies in the bucket, if something does."""
        gradient = self.gradients.get(unit.index)
        return None if gradient is None else gradient.bucket.written(slot)

    def forget(self, unit: Unit, slot: int) -> None:
        """Forget what is pending for a parameter whose `.grad` was set."""
        gradient = self.gradients.get(unit.index)
        if gradient is None:
            return
        gradient.forget(slot)
        if gradient.state is GradientState.GIVEN_UP:
            del self.gradients[unit.index]

    # ---- the end of waiting
    def offers(self) -> Offers:
        """This rank's offers of gradients that wait, for which the next meeting may ask."""
        pending = sorted(self.gradients.items())
        return {self._keys.at_next_meeting(index): uses_of(gradient.bucket) for index, gradient in pending}

    def take(self, index: int) -> Gradient:
        """Take out the gradient of a unit, which waits no longer."""
        return self.gradients.pop(index)

    def take_all(self) -> list[Gradient]:
        """Take out all gradients that wait, in the order of units, which all ranks share."""
        return [self.take(index) for index in sorted(self.gradients)]
