"""Parameters that join a model after `shard()`: LoRA adapters, a new head. They are sharded before their first use.

torch tells when any module gets a parameter or a submodule; only then, and only at the next forward of a sharded
model, is the model looked through.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_watched: "weakref.WeakSet[Growth]" = weakref.WeakSet()
_hooked = False


class Growth:
    def __init__(self) -> None:
        self._suspected = False
        self._enlist: Callable[[], None] | None = None

    def watch(self, enlist: Callable[[], None]) -> None:
        """From now on, `check()` calls `enlist` after modules have changed."""
        global _hooked
        self._enlist, self._suspected = enlist, False
        _watched.add(self)
        if not _hooked:
            _hooked = True
            register_module_parameter_registration_hook(_suspect)
            register_module_module_registration_hook(_suspect)

    def check(self) -> None:
        if self._suspected and self._enlist is not None:
            self._suspected = False
            self._enlist()


def _suspect(module: Any, name: str, value: Any) -> None:
    for growth in _watched:
        growth._suspected = True
