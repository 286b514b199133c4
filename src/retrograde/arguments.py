"""Checks of users' arguments: each returns the value in its plain form, or raises.

An error has the argument's name, what was given, why that cannot be used and what to give instead. Numbers of numpy
and torch are numbers; True and False are not.
"""

import math
import numbers
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from retrograde.errors import RetrogradeError, ShardingError

T = TypeVar("T")
Refusal = type[RetrogradeError]

LONGEST = 60  # characters of a value in an error


def shown(value: Any) -> str:
    """A value as an error shows it: short, in one line, and without reading a tensor of many elements."""
    if isinstance(value, torch.Tensor) and (value.numel() > 8 or isinstance(value, nn.Parameter)):
        return f"{type(value).__name__} of shape {list(value.shape)}"
    text = repr(value)
    if len(text) <= LONGEST and "\n" not in text:
        return text
    return f"{type(value).__name__}(...)"


def wrong(name: str, value: Any, cause: str, fix: str, error: Refusal = ShardingError) -> RetrogradeError:
    """Make the error for an argument that cannot be used; the caller raises it."""
    return error(f"{name}={shown(value)} {cause}; give {fix}")


def whole_number(name: str, value: Any, least: int, fix: str, error: Refusal = ShardingError) -> int:
    found = integer(value)
    if found is None:
        raise wrong(name, value, "is not a whole number", fix, error)
    if found < least:
        raise wrong(name, value, "is too small", fix, error)
    return found


def number(name: str, value: Any, fix: str, error: Refusal = ShardingError, *, cause: str = "is not a number") -> float:
    """Check that the value is a number and not nan."""
    found = _real(value)
    if found is None or math.isnan(found):
        raise wrong(name, value, cause, fix, error)
    return found


def not_negative(name: str, value: Any, fix: str, error: Refusal = ShardingError) -> float:
    found = number(name, value, fix, error)
    if found < 0:
        raise wrong(name, value, "is negative", fix, error)
    return found


def seconds(name: str, value: Any, error: Refusal = ShardingError) -> float:
    """Check that the value is a time for which a thread can wait."""
    fix = "seconds, a number above 0"
    found = number(name, value, fix, error)
    if found <= 0:
        raise wrong(name, value, "is no time to wait", fix, error)
    if found > threading.TIMEOUT_MAX:
        raise wrong(name, value, "is longer than a thread can wait", f"{fix}, such as 86400 for a day", error)
    return found


def flag(name: str, value: Any, error: Refusal = ShardingError) -> bool:
    if isinstance(value, bool):
        return value
    # numpy's truth values are a type of their own; the type is known by name so that numpy need not be imported.
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise wrong(name, value, "is neither true nor false", "True or False", error)


def one_of(name: str, value: Any, choices: Collection[str], fix: str, error: Refusal = ShardingError) -> str:
    """Check that the value is one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(name, value, "is not known", fix, error)
    return value


def instance(
    name: str, value: Any, kind: type[T] | tuple[type[T], ...], cause: str, fix: str, error: Refusal = ShardingError
) -> T:
    if not isinstance(value, kind):
        raise wrong(name, value, cause, fix, error)
    return value


def function(name: str, value: Any, fix: str, error: Refusal = ShardingError) -> Callable[..., Any]:
    if not callable(value):
        raise wrong(name, value, "cannot be called", fix, error)
    return value  # type: ignore[no-any-return]


def check_module(name: str, value: Any) -> nn.Module:
    return instance(name, value, nn.Module, "is not a module", "an nn.Module")


def sequence(name: str, value: Any, fix: str, error: Refusal = ShardingError) -> list[Any]:
    """Check that the value is a list of values. A text is one value, and so is a tensor without dimensions."""
    if isinstance(value, str | bytes | Mapping):
        raise wrong(name, value, "is not a list", fix, error)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        found = value.tolist()
        if isinstance(found, list):
            return found
    raise wrong(name, value, "is not a list", fix, error)


class Said(NamedTuple):
    """One argument of a rank: its meaning, which is compared with other ranks', and the user's words for it."""

    meaning: str
    words: str


def said(name: str, given: Any, meaning: Any) -> Said:
    return Said(repr(meaning), f"{name}={shown(given)}")


def differences(by_rank: Sequence[Sequence[Said]]) -> str:
    """The arguments that differ between ranks: `stage=2 on rank 0, stage=3 on rank 1`. Empty if all are equal.

    An argument whose meaning differs although its words are the same differs because of another argument: it is named
    only if none differs in words.
    """
    in_other_words = []
    in_the_same_words = []
    for everybody in zip(*by_rank, strict=True):
        first = everybody[0]
        differing = [rank for rank, other in enumerate(everybody) if other.meaning != first.meaning]
        if differing:
            rank = differing[0]
            text = f"{first.words} on rank 0, {everybody[rank].words} on rank {rank}"
            if everybody[rank].words != first.words:
                in_other_words.append(text)
            else:
                in_the_same_words.append(text)
    return ", ".join(in_other_words or in_the_same_words)


def integer(value: Any) -> int | None:
    """The integer that a value is; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, torch.Tensor) and _is_scalar(value) and not value.is_floating_point():
        return int(value)
    return None


def _real(value: Any) -> float | None:
    """The number that a value is; None if it is none. Integers stay integers, since floats have a largest number."""
    whole = integer(value)
    if whole is not None:
        return whole
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, torch.Tensor) and _is_scalar(value):
        return float(value)
    return None


def _is_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.dtype is not torch.bool and not tensor.is_complex() and not tensor.is_meta
