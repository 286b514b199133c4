"""Small models whose pages are mappings: so are otherwise only those of shards that are worth it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.layout import flat
from retrograde.pages import Unit
from retrograde.transport.mapped.mirror import ArenaMirror


@contextlib.contextmanager
def everything_mapped() -> Iterator[None]:
    """For models that are sharded inside. Each parameter has memory pages of its own, so that small ones are not all in
    the first rank's shard."""
    kept = flat.WORTH_MAPPING, flat.ALIGNMENT
    flat.WORTH_MAPPING, flat.ALIGNMENT = 1, flat.MEMORY_PAGE
    try:
        yield
    finally:
        flat.WORTH_MAPPING, flat.ALIGNMENT = kept


def mirror_of(unit: Unit) -> ArenaMirror:
    assert isinstance(unit.mirror, ArenaMirror)
    return unit.mirror


def sharded(model: nn.Module, stage: int, **options: Any) -> rg.Engine:
    with everything_mapped():
        return rg.shard(model, stage, **options)


def unequal(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names of parameters that differ."""
    state = model.state_dict()
    return [name for name, param in plain.state_dict().items() if not torch.equal(state[name], param)]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding)]
