"""What one rank saw of a case, and how two sights differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.reference import Grads


@dataclass(frozen=True)
class Trace:
    grads: list[Grads]  # after every optimizer step, before gradients are zeroed
    state: dict[str, Tensor]  # at the end: parameters and this rank's buffers
    records: list[tuple[str, Any]]
    leftovers: list[str]


def differences(got: Trace, want: Trace, rtol: float) -> list[str]:
    """All the ways in which `got` is wrong; empty when it is exact."""
    found = [f"left over: {item}" for item in got.leftovers]
    for step, (g, w) in enumerate(zip(got.grads, want.grads, strict=True)):
        found += _compare(f"gradient after step {step}:", g, w, rtol)
    found += _compare("at the end:", got.state, want.state, rtol)
    names = [name for name, _ in got.records], [name for name, _ in want.records]
    if names[0] != names[1]:
        return [*found, f"records {names[0]} instead of {names[1]}"]
    for index, ((name, g), (_, w)) in enumerate(zip(got.records, want.records, strict=True)):
        problem = _problem(g, w, rtol)
        if problem:
            found.append(f"record {index} {name}: {problem}")
    return found


def _compare(where: str, got: Mapping[str, Any], want: Mapping[str, Any], rtol: float) -> list[str]:
    if list(got) != list(want):
        return [f"{where} names {sorted(set(got) ^ set(want))} are on one side only, or the order differs"]
    problems = {name: _problem(got[name], want[name], rtol) for name in want}
    return [f"{where} {name} {problem}" for name, problem in problems.items() if problem]


def _problem(got: Any, want: Any, rtol: float) -> str:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        if type(got) is type(want) and got == want:
            return ""
        return f"is {_short(got)} instead of {_short(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"is {got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if torch.equal(got, want):
        return ""
    error = (got.double() - want.double()).abs()
    if error.max() <= rtol * want.abs().max():
        return ""
    return f"is off by up to {error.max():.3g} in {int((error > 0).sum())} of {want.numel()} elements"


def _short(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
