"""The states of this rank's random generators: torch's, those of devices, Python's and numpy's."""

import random
import sys
from typing import Any

import numpy
import torch


def generator_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _listed(random.getstate())}
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states["device"] = module.get_rng_state()
    if "numpy.random" in sys.modules:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = [name, [int(key) for key in keys], *rest]
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(states["device"])
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _listed(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]
