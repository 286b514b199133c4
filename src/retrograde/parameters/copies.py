"""What `state_dict()` has of a sharded parameter: a copy, and a watch over who writes to it.

In torch a state dict shares the model's memory, and writing to it changes the model. A sharded model has no such memory
to share, so its state dict is a copy. A write to it would be lost without a word; it is refused instead, when the
parameter is used next. (It cannot be refused at once: the copies are plain tensors, as savers and other models
want them.)

All copies of a parameter share one version counter, which outlives them: `model.state_dict()["w"].mul_(2)` leaves
nothing behind but that count. Writes that move no counter (`.data`, numpy) are not seen.
"""

import weakref
from typing import Any

import torch

from retrograde.errors import UnsupportedError
from retrograde.torch_internals import set_data, version_of


class _Copies:
    """Those of one parameter."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.counter = torch.empty(0, dtype=dtype, device=device)
        self.seen = version_of(self.counter)
        self.last: weakref.ref[torch.Tensor] | None = None
        self.last_version = -1  # of the parameter, when the last copy was made

    def make(self, full: torch.Tensor, version: int) -> torch.Tensor:
        copy = self.counter.detach()  # shares the counter ...
        set_data(copy, full.detach().clone())  # ... and has memory of its own
        self.last, self.last_version = weakref.ref(copy), version
        return copy


class Copied:
    """The side of a sharded parameter that state dicts see (parameters/pieces.py has the parameter)."""

    __slots__ = ()
    unit: Any
    place: int
    slot: Any
    full: Any
    copies: _Copies | None

    @torch.inference_mode(mode=False)
    def copy_for(self, destination: dict[str, Any]) -> torch.Tensor:
        """The copy for a state dict; of a tied weight, all entries share the first one's memory."""
        full: torch.Tensor = self.full()
        version = version_of(self.unit.pieces[self.place])
        if self.copies is None:
            self.copies = _Copies(full.dtype, full.device)  # type: ignore[misc]  # the parameter has a __dict__
        last = self.copies.last() if self.copies.last is not None else None
        if last is not None and self.copies.last_version == version and any(last is t for t in destination.values()):
            return last.detach()
        return self.copies.make(full, version)

    def check_copies(self) -> None:
        """Refuse what was written to a copy since this was last asked."""
        if self.copies is None or version_of(self.copies.counter) == self.copies.seen:
            return
        self.forget_writes_to_copies()  # once: who catches this may go on
        name = self.slot.name
        raise UnsupportedError(
            f"rank {self.unit.rank}: what state_dict() returned for parameter {name} was written to. It is a copy, so "
            f"the model has not changed, as it would in torch: edit the parameter (with torch.no_grad(): "
            f"model.get_parameter({name!r}).copy_(value)), or give the changed dict to load_state_dict(). For "
            f"a state of your own, such as an average, start from copy.deepcopy(model.state_dict())"
        )

    def forget_writes_to_copies(self) -> None:
        """They are in the parameter now, or have been told."""
        if self.copies is not None:
            self.copies.seen = version_of(self.copies.counter)
