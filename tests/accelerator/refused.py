"""Rows of the matrix that torch refuses with offload, since `p` and `p.grad` are on the host then."""

from __future__ import annotations

# What else they compute with is on the device: tensors of their own that they make without saying where, or weights.
WHY = {
    "31l": "averages in lists of plain tensors of the device",
    "31m": "a vector of whole weights, on the device, beside one of whole gradients, on the host",
    "31o": "plain buffers of the device beside `p.grad`",
    "31p": "masks and indices of the device, for `p.grad`",
}
WORDS = "on the same device"  # torch's, and the test device's


def is_refused(key: str, faults: list[str]) -> bool:
    """Is it one of those rows, and refused for that reason?"""
    return key in WHY and len(faults) == 1 and WORDS in faults[0]
