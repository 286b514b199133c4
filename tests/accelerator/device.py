"""The test device "late": PrivateUse1 in host memory, whose work waits in streams and runs as late as permitted.

    from tests.accelerator import device

    device.load()                                  # builds it if needed, registers it with torch
    with device.use("lazy"):                       # or "sides", "eager", "random" with a seed
        x = torch.ones(4, device="late")           # queued
        ...
        assert device.synchronisations() == {}     # nothing has made the host wait so far

Leaving `use` runs what is left, and raises if the happens-before checker has found a race that nobody asked for with
`races()`. README.md says what is simulated and how.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

NAME = "late"
BACKEND = "cpu:gloo,late:late"  # for init_process_group

# (mode, seed). No single order shows every hazard as a wrong value; the checker needs none of them in particular.
MODES = (("lazy", 0), ("sides", 0), ("eager", 0), ("random", 1), ("random", 2))


class RaceFound(AssertionError):
    """Two jobs touch the same memory, and nothing orders them."""


@dataclass(frozen=True)
class Tally:
    count: int
    bytes: int


@functools.cache
def load() -> ModuleType:
    """Builds and registers the device, once in a process. Returns the extension."""
    from tests.accelerator import build, face

    spec = importlib.util.spec_from_file_location(build.NAME, build.build())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    sys.modules[build.NAME] = native
    spec.loader.exec_module(native)
    atexit.register(native.stop)
    face.register(NAME, native)
    return native


@contextlib.contextmanager
def use(mode: str, seed: int = 0) -> Iterator[None]:
    """Runs what is queued in that order, with counters and races from zero on."""
    native = load()
    native.settle()
    native.take_races()
    native.reset_counters()
    native.set_mode(native.Mode.__members__[mode], seed)
    try:
        yield
        native.settle()
        found = races()
        if found:
            raise RaceFound("\n".join(found))
    finally:
        native.set_mode(native.Mode.eager, 0)
        native.settle()
        native.take_races()


def races() -> list[str]:
    """What the checker has found since the last call, a sentence for each pair of operators and streams."""
    return load().take_races()


def synchronisations() -> dict[str, int]:
    """How often the host has waited for the device, by cause."""
    return load().synchronisations()


def copies() -> dict[str, Tally]:
    """What has moved bytes without changing them, by direction or operator."""
    return _tallies(load().copies())


def collectives() -> dict[str, Tally]:
    """Collectives by name, with the bytes of their larger side."""
    return _tallies(load().collectives())


def operators() -> dict[str, int]:
    """Operators that were issued, by name."""
    return load().operators()


def streams() -> dict[str, int]:
    """How many jobs were issued on which stream. Collectives are left out: their streams are the process group's."""
    return load().streams()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """The current stream says that what is issued there is recorded into a graph. Nothing is."""
    native = load()
    native.set_capturing(True)
    try:
        yield
    finally:
        native.set_capturing(False)


def reset_counters() -> None:
    load().reset_counters()


def pending() -> list[str]:
    """What is queued and has not run: stream and name."""
    return load().pending()


def of_rank(rank: int) -> torch.device:
    """The device of a rank of the tests. It becomes the current one."""
    index = rank % load().device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(NAME, index)


def move(module: nn.Module, where: torch.device) -> nn.Module:
    """`module.to(where)` as it is for a GPU: parameters remain the same objects. For devices that torch does not know
    it makes new ones, and of a tied one two."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(where)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _tallies(pairs: dict[str, tuple[int, int]]) -> dict[str, Any]:
    return {name: Tally(count, size) for name, (count, size) in pairs.items()}
