"""What differs between ranks, of what all have: torch keeps one of several values that ranks give under one key.

Of the model these are buffers, such as the statistics of a BatchNorm, of which each rank has its own, and other things
that modules put into a state dict. Each rank gets its own back; at another number of ranks all get the first's.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from retrograde.checkpoint.snapshot import Serialized, deserialized
from retrograde.parameters.sharded_tensor import ShardedTensor


class Meanings(NamedTuple):
    """Checksums of what a rank saves that may be its own, by which ranks find what differs."""

    extra: dict[str, int]
    model: dict[str, int]  # without parameters


def meanings(extra: Mapping[str, Serialized], model: Mapping[str, Any], parameters: Collection[str]) -> Meanings:
    return Meanings(
        {key: _meaning(value) for key, value in extra.items()},
        {name: _meaning(value) for name, value in model.items() if name not in parameters},
    )


def extra_by_rank(extra: dict[str, Serialized], by_rank: Sequence[Meanings], rank: int) -> dict[str, Any]:
    """Sort extra values: equal ones are saved once, others for each rank."""
    first = by_rank[0].extra
    alike = {key for key in extra if all(each.extra.get(key) == first.get(key) for each in by_rank)}
    state: dict[str, Any] = {"extra": {key: value for key, value in extra.items() if key in alike}}
    if len(alike) < len(extra):
        own = {key: value for key, value in extra.items() if key not in alike}
        state["extra_by_rank"] = {str(rank): own}
    return state


def model_by_rank(model: dict[str, Any], by_rank: Sequence[Meanings], rank: int) -> dict[str, Any]:
    """What each rank has its own of. In `model` the first of the ranks that have it keeps it, and it is taken from the
    others, which would give torch the choice."""
    own: dict[str, Any] = {}
    for name in by_rank[rank].model:
        having = [each for each, said in enumerate(by_rank) if name in said.model]
        if len({by_rank[each].model[name] for each in having}) > 1:
            own[name] = model[name] if rank == having[0] else model.pop(name)
    return {"model_by_rank": {str(rank): own}} if own else {}


def _meaning(value: Any) -> int:
    """A checksum that equal values share, however they are pickled."""
    if isinstance(value, ShardedTensor):
        return 0  # each rank has its part of one value
    if isinstance(value, Serialized):
        return _meaning(deserialized(value.data))
    if isinstance(value, torch.Tensor):
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return zlib.crc32(data, zlib.crc32(repr((value.dtype, value.shape)).encode()))
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(key, _meaning(each)) for key, each in value.items()]).encode(), 1)
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([_meaning(each) for each in value]).encode(), 2)
    return zlib.crc32(repr((type(value).__name__, value)).encode(), 3)
