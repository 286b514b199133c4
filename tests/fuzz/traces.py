"""What a rank saw in a case, and how two of those differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Grads = dict[str, Tensor | None]


@dataclass
class Trace:
    """`grads`: whole gradients at the end of each phase's acts. `faults`: what was wrong without any comparison."""

    grads: list[Grads]
    weights: Grads
    records: list[tuple[str, Tensor]]
    faults: list[str]


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
    return [name for name, tensor in theirs.items() if not _same(ours[name], tensor)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
