"""Snapshots of what is saved: tensors as they are or copied, everything else as bytes.

Bytes are made before anything is written, and are read once to see that they can be read: a reader executes nothing, so
it knows only plain values, tensors and containers of these.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from retrograde.arguments import shown
from retrograde.errors import CheckpointError


@dataclass(frozen=True)
class Serialized:
    """The bytes of a pickled object that is not a tensor."""

    data: bytes


def serialized(value: Any, name: str) -> Serialized:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        deserialized(file.getvalue())
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{name}={shown(value)} could not be read back without executing code; give numbers, texts, tensors, "
            f"lists and dictionaries of them, or an object with state_dict() and load_state_dict() that gives these"
        ) from error
    return Serialized(file.getvalue())


def deserialized(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def snapshot(value: Any, name: str, *, copy: bool) -> Any:
    """Make a tree of tensors and `Serialized`. With `copy` it shares no memory with the model and its optimizers.

    As torch.distributed.checkpoint does, it takes apart dictionaries, and lists that have tensors or dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if copy else value.detach()
    if _has_texts_as_keys(value):
        return snapshots(value, name, copy=copy)
    if isinstance(value, list) and _has_parts(value):
        return [snapshot(each, f"{name}.{number}", copy=copy) for number, each in enumerate(value)]
    return serialized(value, name)


def snapshots(values: Mapping[str, Any], name: str, *, copy: bool) -> dict[str, Any]:
    """A snapshot of each value of a dictionary, which may be without entries."""
    return {key: snapshot(each, f"{name}.{key}", copy=copy) for key, each in values.items()}


def _has_parts(value: list[Any]) -> bool:
    return any(
        isinstance(each, torch.Tensor) or _has_texts_as_keys(each) or (isinstance(each, list) and _has_parts(each))
        for each in value
    )


def _has_texts_as_keys(value: Any) -> bool:
    """Is it a dictionary that can be taken apart? Of one without entries nothing would be left, and a key that is no
    text would come back as its text."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) for key in value)
