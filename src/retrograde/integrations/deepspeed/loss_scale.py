"""The loss scale of fp16 by DeepSpeed's options, over torch's `GradScaler`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from retrograde.integrations.deepspeed.refusals import ConfigError


@dataclass(frozen=True)
class LossScale:
    """The options of the loss scale. If `fixed` is not 0, the scale stays at it. Otherwise it begins with `first`,
    doubles after `window` updates, and is halved by an overflow, down to `least`."""

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
        self._in_scaled_backward = False

    @property
    def scale(self) -> float:
        return float(self._scaler.get_scale())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled = self._scaler.scale(loss)
        if scaled.requires_grad:
            scaled.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return scaled

    def _note_backward(self, grad: torch.Tensor) -> None:
        self._in_scaled_backward = True

    def watch(self, outputs: Any) -> Any:
        """Have backwards through a forward's outputs checked: they must start at a scaled loss. After one that does,
        others pass until the next forward or step."""
        self._in_scaled_backward = False
        for output in _tensors_in(outputs):
            if output.requires_grad:
                output.register_hook(self._check_backward)  # type: ignore[no-untyped-call]
        return outputs

    def _check_backward(self, grad: torch.Tensor) -> None:
        if not self._in_scaled_backward:
            raise ConfigError(
                "fp16.enabled: this backward starts at a loss that was not scaled, and its gradients would be divided "
                "by the scale all the same; call engine.backward(loss), or engine.scale(loss).backward()"
            )

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale, so that they are those of the loss itself."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update, unless a gradient is not finite. Returns whether it has updated."""
        self._in_scaled_backward = False
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


def _tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _tensors_in(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors_in(each)
