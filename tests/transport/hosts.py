"""Ranks that take each other for ranks of other hosts, or share no memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import torch.distributed as dist

from retrograde.transport import ProcessRanks, ShardServer, connecting
from retrograde.transport.connections import Connections
from retrograde.transport.one_sided import OneSidedTransport


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


@contextlib.contextmanager
def over_connections() -> Iterator[None]:
    """Engines that are made inside share no memory with other ranks, though these are on the same host."""
    real = ProcessRanks._host_transport

    def transport(self: ProcessRanks, shards: ShardServer, timeout: float) -> OneSidedTransport:
        return OneSidedTransport(self._connections, shards, timeout)

    ProcessRanks._host_transport = transport  # type: ignore[method-assign]
    try:
        yield
    finally:
        ProcessRanks._host_transport = real  # type: ignore[method-assign]
