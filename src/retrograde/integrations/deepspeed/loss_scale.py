"""fp16's loss scale in DeepSpeed's words, by torch's `GradScaler`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


@dataclass(frozen=True)
class LossScale:
    """`fixed`: one that stays, if it is not 0. Else it begins with `first`, doubles after `window` updates, and an
    overflow halves it, down to `least`."""

    fixed: float
    first: float
    window: int
    least: float

    def scaler(self, device: torch.device) -> "LossScaler":
        return LossScaler(self, device)


class LossScaler:
    """Scales losses, and skips updates with gradients that are not finite, on all ranks alike."""

    def __init__(self, said: LossScale, device: torch.device) -> None:
        self._said = said
        window = max(said.window, 1)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=said.fixed or said.first, growth_interval=window)

    @property
    def scale(self) -> float:
        return float(self._scaler.get_scale())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)

    def unscale(self, optimizer: Optimizer) -> None:
        """Gradients are those of the loss itself from now on."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update, unless a gradient is not finite. Says whether it did."""
        updates: list[bool] = []
        watch = optimizer.register_step_post_hook(lambda *given: updates.append(True))
        try:
            self._scaler.step(optimizer)
        finally:
            watch.remove()
        self._update()
        return bool(updates)

    def _update(self) -> None:
        if self._said.fixed:
            self._scaler.update(self._said.fixed)
            return
        self._scaler.update()
        if self.scale < self._said.least:
            self._scaler.update(self._said.least)
