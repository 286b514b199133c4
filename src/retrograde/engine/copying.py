"""`copy.deepcopy(model)` of a sharded model: a second one, sharded in the same way, for a reference or an average.

All ranks make it together. No rank ever holds the whole: the copy is made on the meta device, and gets its values from
the first model's pages, one parameter after the other.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from retrograde.compiling import without_regions
from retrograde.layout import Precision
from retrograde.parameters import ShardedParameter
from retrograde.parameters.access import original_class
from retrograde.torch_internals import forget_weight_references


def copied(
    model: nn.Module,
    memo: dict[int, Any],
    precision: Precision,
    shard: Callable[[nn.Module, Mapping[int, ShardedParameter]], object],
) -> nn.Module:
    """Copy a sharded model. `shard(copy, sources)` makes the copy, which is on the meta device, a sharded model, too.

    `sources`: by the identity of a parameter on the meta device, the one whose value it gets."""
    sources: dict[int, ShardedParameter] = {}
    stand_ins = []  # alive, so that their identities are theirs alone
    for leaf in model.parameters():
        if isinstance(leaf, ShardedParameter):
            as_given = leaf.unit.layout.dtype if precision.page is None else leaf.dtype
            stand_in = nn.Parameter(leaf.blank().to(as_given), leaf.requires_grad)
            stand_ins.append(stand_in)
            sources[id(stand_in)] = leaf
            memo[id(leaf)] = stand_in
    with without_regions(model), _of_the_users_classes(model):
        made = copy.deepcopy(model, memo)
    for module in made.modules():
        forget_weight_references(module)
    shard(made, sources)
    return made


@contextlib.contextmanager
def _of_the_users_classes(model: nn.Module) -> Iterator[None]:
    """For a while, let modules be of the classes they had before they were sharded."""
    classes = {module: type(module) for module in model.modules()}
    try:
        for module, cls in classes.items():
            module.__class__ = original_class(cls)
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
