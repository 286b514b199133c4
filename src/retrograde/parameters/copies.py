"""Copies of sharded parameters in `state_dict()`, and the check that nobody has written to them.

In torch a state dict shares the model's memory, and writing to it changes the model. A sharded model has no such memory
to share, so its state dict is a copy. A write to it would be lost silently; instead, the next use of the parameter
raises. (The write itself cannot raise: the copies are plain tensors, as savers and other models want them.)

All copies of a parameter share one version counter, which outlives them: `model.state_dict()["w"].mul_(2)` leaves
nothing behind but that count. Writes that move no counter (`.data`, numpy) are not seen.
"""

import weakref
from collections.abc import Mapping

import torch

from retrograde.errors import UnsupportedError
from retrograde.torch_internals import set_data, version_of


class StateDictCopies:
    """All copies of one parameter in state dicts."""

    def __init__(self, name: str, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._rank = rank
        self._counter = torch.empty(0, dtype=dtype, device=device)
        self._seen = version_of(self._counter)
        self._last: weakref.ref[torch.Tensor] | None = None
        self._last_version: int | None = None  # of the parameter, when the last copy was made

    def copy(self, full: torch.Tensor, version: int, destination: Mapping[str, object]) -> torch.Tensor:
        """Make the copy for a state dict. The entries of a tied weight share the memory of the first of them."""
        last = None if self._last is None else self._last()
        if last is not None and self._last_version == version and any(last is each for each in destination.values()):
            return last.detach()
        copy = self._counter.detach()  # shares the counter ...
        set_data(copy, full.detach().clone())  # ... and has memory of its own
        self._last = weakref.ref(copy)
        self._last_version = version
        return copy

    def check(self) -> None:
        """Raise if a copy was written to since the last check."""
        if version_of(self._counter) == self._seen:
            return
        self.forget_writes()  # raises once: a caller that catches the error may go on
        raise UnsupportedError(
            f"rank {self._rank}: what state_dict() returned for parameter {self._name} was written to. It is a copy, "
            f"so the model has not changed, as it would in torch: edit the parameter (with torch.no_grad(): "
            f"model.get_parameter({self._name!r}).copy_(value)), or give the changed dict to load_state_dict(). For "
            f"a state of your own, such as an average, start from copy.deepcopy(model.state_dict())"
        )

    def forget_writes(self) -> None:
        """Raise no error for writes so far: they are in the parameter now, or have been reported."""
        self._seen = version_of(self._counter)
