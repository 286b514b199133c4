"""Parameters that join a model after `shard()`: LoRA adapters, a new head. They are sharded before their first use.

torch tells when any module gets a parameter or a submodule; only then, and only at the next forward of one of a sharded
model's modules, is the model looked through.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_exporting
from torch.nn.modules import module as modules

from retrograde.errors import UnsupportedError
from retrograde.pages import FullTensor

_changes = [0]  # parameters and submodules registered, by any module of the process


@functools.cache
def _start_counting() -> None:
    def count(module: Any, name: str, value: Any) -> None:
        if isinstance(value, FullTensor):  # a frozen one: others are no leaves, which torch refuses itself
            what = f"{type(module).__name__}.{name}: a full tensor of a sharded parameter"
            raise UnsupportedError(f"{what}; tie or parametrize before rg.shard(), or assign model.get_parameter(...)")
        _changes[0] += 1

    modules.register_module_parameter_registration_hook(count)
    modules.register_module_module_registration_hook(count)


def growth(enlist: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `enlist` if modules have changed since it was last called."""
    _start_counting()
    seen = list(_changes)

    def check() -> None:
        if is_exporting():
            raise UnsupportedError(
                "torch.export of a sharded model: it would record pages, which come and go. Build the plain model, "
                "load_state_dict(model.state_dict()) and export that"
            )
        if seen != _changes:
            enlist()
            seen[:] = _changes

    return check
