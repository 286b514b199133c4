"""What a rank saw in a case, and how two of those differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.recipes import Recipe
from tests.reference import Grads, same


class Reduced(NamedTuple):
    times: int
    params: list[str]


@dataclass
class Trace:
    """`grads`: whole gradients at the end of each phase's acts. `faults`: what was wrong without any comparison.

    `backwards`: of plain torch, which backwards of a phase brought a gradient of each parameter.
    `reductions`: of the engine, how often a phase reduced each unit, with the names of its parameters.
    """

    grads: list[Grads]
    weights: Grads
    records: list[tuple[str, Tensor]]
    faults: list[str] = field(default_factory=list)
    backwards: list[dict[str, set[int]]] = field(default_factory=list)
    reductions: list[dict[str, Reduced]] = field(default_factory=list)


def copies(tensors: Mapping[str, Tensor | None]) -> Grads:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def differences(got: Trace, want: Trace) -> list[str]:
    found = list(got.faults)
    for phase, (ours, theirs) in enumerate(zip(got.grads, want.grads, strict=True)):
        found += [f"phase {phase}: gradient of {name}" for name in _unequal(ours, theirs)]
    found += [f"weight {name}" for name in _unequal(got.weights, want.weights)]
    if [name for name, _ in got.records] != [name for name, _ in want.records]:
        return [*found, "other records"]
    pairs = zip(got.records, want.records, strict=True)
    return found + [f"record {i}: {a[0]}" for i, (a, b) in enumerate(pairs) if not torch.equal(a[1], b[1])]


def _unequal(ours: Grads, theirs: Grads) -> list[str]:
    if ours.keys() != theirs.keys():
        return ["other names"]
    return [name for name, tensor in theirs.items() if not same(ours[name], tensor)]


def miscounted(recipe: Recipe, got: Trace, want: Trace) -> list[str]:
    """One reduction for each backward that has gradients of a unit; at stage 1 and in a window one for all of them.

    Only where that is all there is to say: ranks that do the same, and nothing that is captured, given up or hooked."""
    found = []
    for number, phase in enumerate(recipe.phases):
        if not phase.alike or phase.needs_all or phase.budget is not None or recipe.hooked or recipe.in_backward:
            continue
        for unit, (times, params) in got.reductions[number].items():
            backwards = set().union(*(want.backwards[number][name] for name in params))
            together = recipe.stage == 1 or phase.window is not None
            expected = min(len(backwards), 1) if together else len(backwards)
            if times != expected:
                found.append(f"phase {number}: {times} reductions of {unit}, not {expected}")
    return found
