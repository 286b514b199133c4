"""Parametrizations (`nn.utils.parametrize`, `parametrizations.weight_norm`) come before `shard()`.

After it they are refused: they make a parameter of what `module.weight` returns, which is not one then. torch's own
errors speak of leaves and `detach()`, so the class they are all made with looks first, before anything of the module
has changed. What this assumes of torch: `register_parametrization` hands what it parametrizes to `ParametrizationList`
as the second argument.

The old `nn.utils.weight_norm` is a hook that computes a weight from two new parameters, and works.
"""

import functools
from typing import Any

from torch.nn.utils.parametrize import ParametrizationList

from retrograde.errors import UnsupportedError
from retrograde.pages import FullTensor


@functools.cache
def refuse_parametrizations() -> None:
    """Wrap the class's constructor, once for the process."""
    original = ParametrizationList.__init__

    @functools.wraps(original)
    def __init__(self: Any, modules: Any, parametrized: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if isinstance(parametrized, FullTensor):
            leaf: Any = parametrized.leaf
            raise UnsupportedError(
                f"rank {leaf.unit.rank}: parametrizing parameter {leaf.slot.name}, which is sharded: register "
                f"parametrizations (weight_norm, spectral_norm, orthogonal, your own) before rg.shard(), which then "
                f"shards what they compute the weight from"
            )
        original(self, modules, parametrized, *args, **kwargs)

    ParametrizationList.__init__ = __init__  # type: ignore[method-assign, assignment]
