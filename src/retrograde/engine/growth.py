"""Parameters that join a model after `shard()`: LoRA adapters, a new head. They are sharded before their first use.

torch tells when any module gets a parameter or a submodule; only then, and only at the next forward of a sharded
model, is the model looked through.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as modules

_registered = 0  # parameters and submodules, by any module of the process


def _count(module: Any, name: str, value: Any) -> None:
    global _registered
    _registered += 1


@functools.cache
def _start_counting() -> None:
    modules.register_module_parameter_registration_hook(_count)
    modules.register_module_module_registration_hook(_count)


class Growth:
    """`check()` calls `enlist` after modules have changed."""

    def __init__(self, enlist: Callable[[], None]) -> None:
        _start_counting()
        self._enlist, self._seen = enlist, _registered

    def check(self) -> None:
        if self._seen != _registered:
            self._seen = _registered
            self._enlist()
