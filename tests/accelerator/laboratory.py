"""The device's parts without torch: jobs that only note that they ran, in memory that is intervals of numbers."""

from __future__ import annotations

from typing import Any

from tests.accelerator import device


def laboratory(mode: str, seed: int = 0) -> Any:
    native = device.load()
    made = native.Laboratory()
    made.set_mode(native.Mode.__members__[mode], seed)
    return made
