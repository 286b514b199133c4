"""Comparing rows of the matrix whose sums the backend has made, as it does by default on accelerators."""

from __future__ import annotations

from dataclasses import replace

from tests.patterns.registry import Case
from tests.patterns.trace import Trace, differences

OTHER_ORDER = 1e-4  # after some steps, in fp32
ROUNDED = 2**-5  # in bf16, of which a sum has eight bits


def differences_of_sums(case: Case, world: int, exact: bool, got: Trace, want: Trace) -> list[str]:
    """The ways in which `got` is wrong. With `exact` every bit counts.

    The backend rounds a sum to the dtype that travels, and adds up more than two parts in an order of its own. In low
    precision only the first step's gradients are compared: optimizers that divide by a norm make much of a rounding."""
    if exact:
        return differences(got, want, case.rtol)
    if case.precision is not None:
        return differences(_first_gradients(got), _first_gradients(want), ROUNDED)
    return differences(got, want, case.rtol if world == 2 else max(case.rtol, OTHER_ORDER))


def _first_gradients(trace: Trace) -> Trace:
    return replace(trace, grads=trace.grads[:1], state={}, records=[])
