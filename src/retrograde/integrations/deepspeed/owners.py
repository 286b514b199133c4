"""Finds the engine of a parameter, since DeepSpeed's helpers are given a parameter and nothing else.

The table is weak on both sides: it keeps neither parameters nor engines alive. A parameter belongs to one engine.
"""

import weakref
from collections.abc import MutableMapping
from typing import cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from retrograde.integrations.deepspeed.engine import DeepSpeedEngine

_Table = MutableMapping[torch.Tensor, "weakref.ref[DeepSpeedEngine]"]
_ENGINE_OF = cast(_Table, WeakTensorKeyDictionary())


def remember(engine: DeepSpeedEngine) -> None:
    for parameter in engine.module.parameters():
        _ENGINE_OF[parameter] = weakref.ref(engine)


def engine_of(parameter: torch.Tensor) -> DeepSpeedEngine | None:
    """The engine of a parameter; None if no engine has it."""
    found = _ENGINE_OF.get(parameter)
    return None if found is None else found()
