"""What loading sees of a checkpoint: tensors by name, of which any part can be read.

Checkpoints have several formats (formats/). Each gives a `Checkpoint`; loading knows nothing else of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from retrograde.errors import CheckpointError


class Extent(NamedTuple):
    """A part of a tensor that is a slice in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def all_of(shape: Sequence[int]) -> "Extent":
        return Extent((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


class Stored(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def check(self, extent: Extent) -> None:
        """Raise a `CheckpointError` unless all bytes of this part are there, and are what was saved."""

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Read this part, which was checked, into a tensor of its sizes."""


class StoredObject(Protocol):
    """An object in a checkpoint that is not a tensor."""

    def load(self) -> Any: ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, of any format. Fields for what a checkpoint does not have are empty."""

    folder: Path
    origin: str  # which program wrote it, for the report
    model: Mapping[str, Any]  # by name: `Stored`, `StoredObject`, or a tree of them
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the optimizer's, by parameter, then by key
    groups: Sequence[Mapping[str, Any]] = ()
    numbered: bool = False  # true if the optimizer's parameters have numbers instead of names
    extra: Mapping[str, Any] = field(default_factory=dict)
    extra_by_rank: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model_by_rank: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # as `model`, what ranks have their own of
    rng: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # states of random generators, by rank
    notes: Sequence[str] = ()  # what was not taken, for the report
    saved_at: float | None = None  # when it was complete, by which one save is known from another; None: not written
    close: Callable[[], None] = lambda: None  # closes its files

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def value_of(tree: Any) -> Any:
    """Read everything in a tree."""
    if isinstance(tree, Mapping):
        return {key: value_of(each) for key, each in tree.items()}
    if isinstance(tree, list):
        return [value_of(each) for each in tree]
    if is_tensor(tree):
        return whole(tree)
    return tree.load() if hasattr(tree, "load") else tree


def whole(stored: Stored) -> torch.Tensor:
    extent = Extent.all_of(stored.shape)
    stored.check(extent)
    made = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(extent, made)
    return made


def check_shape(what: str, stored: Stored, shape: torch.Size) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"{what} has shape {tuple(stored.shape)} in the checkpoint and {tuple(shape)} here: is it another model's?"
        )
