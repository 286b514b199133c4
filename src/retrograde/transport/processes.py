"""Ranks that are processes: those of a process group of torch.distributed."""

from collections.abc import Sequence

import torch.distributed as dist

from retrograde.devices import Streams
from retrograde.transport.channel import ConnectedChannel
from retrograde.transport.collective import CollectiveStart
from retrograde.transport.connections import TIMEOUT, Connections
from retrograde.transport.device_channel import DeviceChannel
from retrograde.transport.mapped.channel import MappedChannel
from retrograde.transport.mapped.transport import MappedTransport
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.protocol import Channel, GatheredShards, ShardServer, Transport, Way
from retrograde.transport.staged import StagedShards, StagedTransport


class ProcessRanks:
    """The ranks of a process group, connected. Implements `PipelineRanks`."""

    def __init__(self, group: dist.ProcessGroup, timeout: float = TIMEOUT) -> None:
        """All ranks of the group come here, within `timeout` seconds."""
        self._connections = Connections.of(group, timeout)
        self.rank = self._connections.rank
        self.world = self._connections.world

    def should_call(self, streams: Streams) -> bool:
        """Are collectives the way between these ranks? They are on a device, and between hosts, if the process group
        has a backend for the host's memory."""
        if not streams.on_host:
            return True
        return self._connections.spans_hosts and "cpu:" in dist.get_backend_config(self._connections.group())

    def transport(self, shards: ShardServer, streams: Streams, timeout: float) -> Transport:
        if streams.on_host:
            return self._host_transport(shards, timeout)
        return StagedTransport(self._host_transport(StagedShards(shards, streams), timeout), streams)

    def collective_start(self, shards: GatheredShards, streams: Streams, timeout: float) -> CollectiveStart:
        """The beginning of a transport by collectives, which is opened when all ranks have agreed that they want it."""
        if streams.on_host:
            host = OneSidedTransport(self._connections, shards, timeout)
            return CollectiveStart(host, host, streams, shards)
        host = OneSidedTransport(self._connections, StagedShards(shards, streams), timeout)
        return CollectiveStart(StagedTransport(host, streams), host, streams, shards)

    def _host_transport(self, shards: ShardServer, timeout: float) -> OneSidedTransport:
        neighbours = self._connections.neighbours
        if neighbours is not None:
            return MappedTransport(self._connections, neighbours, shards, timeout)
        return OneSidedTransport(self._connections, shards, timeout)

    def channel(self, streams: Streams, patience: float, ways: Sequence[Way]) -> Channel:
        neighbours = self._connections.neighbours
        if not streams.on_host and self.world > 1:
            return DeviceChannel(self._connections, streams, patience, ways)
        if neighbours is not None:
            return MappedChannel(self._connections, neighbours, streams.device, patience)
        return ConnectedChannel(self._connections, streams.device, patience)

    def say_goodbye(self) -> None:
        self._connections.say_goodbye()
