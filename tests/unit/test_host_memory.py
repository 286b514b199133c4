"""Large tensors of the host: a mapping for each, of huge pages, which goes with its tensor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from retrograde.devices.host_memory import LARGE, host_empty

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the process's mappings from /proc")
NUMEL = LARGE // 4


def _mapping_of(address: int) -> list[str]:
    """What the kernel says of the mapping at an address: a line with its bounds, then lines about it."""
    found: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split()[0].split("-")
        if len(bounds) == 2:
            if found:
                return found
            if int(bounds[0], 16) <= address < int(bounds[1], 16):
                found = [line]
        elif found:
            found.append(line)
    return found


def _flags(mapping: list[str]) -> list[str]:
    return next(line for line in mapping if line.startswith("VmFlags:")).split()[1:]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
def test_it_is_a_tensor_like_others(dtype: torch.dtype) -> None:
    made = host_empty(LARGE, dtype)
    assert (made.shape, made.dtype, made.device.type) == ((LARGE,), dtype, "cpu")
    assert made.storage_offset() == 0 and made.data_ptr() % 64 == 0
    made.fill_(3)
    assert torch.equal(made.clone(), torch.full((LARGE,), 3, dtype=dtype))


def test_huge_pages_are_asked_for() -> None:
    made = host_empty(NUMEL, torch.float32)
    assert "hg" in _flags(_mapping_of(made.data_ptr()))
    small = host_empty(NUMEL - 1, torch.float32)
    assert "hg" not in _flags(_mapping_of(small.data_ptr()))


def test_a_view_keeps_it_and_the_last_one_takes_it_along() -> None:
    made = host_empty(NUMEL, torch.float32)
    address = made.data_ptr()
    part = made[NUMEL // 2 :].zero_()
    del made
    assert "hg" in _flags(_mapping_of(address)) and part.sum() == 0
    del part
    assert _mapping_of(address) == [] or "hg" not in _flags(_mapping_of(address))
