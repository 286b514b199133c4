"""Parametrizations (`nn.utils.parametrize`, `parametrizations.weight_norm`) come before `shard()`.

After it they are refused: they make a parameter of what `module.weight` returns, which is not one then. torch's own
errors speak of leaves and `detach()`, so the class they are all made with looks first, before anything of the module
has changed (torch_internals).

The old `nn.utils.weight_norm` is a hook that computes a weight from two new parameters, and works.
"""

import functools
from typing import Any

from retrograde.errors import UnsupportedError
from retrograde.pages import FullTensor
from retrograde.parameters import ShardedParameter
from retrograde.torch_internals import before_parametrizing


@functools.cache
def refuse_parametrizations() -> None:
    """Wrap the constructor of torch's class for parametrizations, once for the process."""

    def refuse(parametrized: Any) -> None:
        leaf = parametrized.leaf if isinstance(parametrized, FullTensor) else None
        if isinstance(leaf, ShardedParameter):
            raise UnsupportedError(
                f"rank {leaf.unit.grid.rank}: parametrizing parameter {leaf.slot.name}, which is sharded: register "
                f"parametrizations (weight_norm, spectral_norm, orthogonal, your own) before rg.shard(), which then "
                f"shards what they compute the weight from"
            )

    before_parametrizing(refuse)
