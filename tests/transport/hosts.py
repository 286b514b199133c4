"""Ranks that take each other for ranks of other hosts."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import torch.distributed as dist

from retrograde.transport import connecting
from retrograde.transport.connections import Connections


@contextlib.contextmanager
def apart() -> Iterator[None]:
    real = connecting.host
    connecting.host = secrets.token_hex
    try:
        yield
    finally:
        connecting.host = real


def group_over_tcp() -> dist.ProcessGroup:
    """All ranks, connected over TCP, of which the kernel keeps count."""
    group = dist.new_group()
    with apart():
        Connections.of(group)
    return group
