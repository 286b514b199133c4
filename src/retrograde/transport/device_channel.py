"""A pipeline's channel between devices: heads over connections, tensors by lanes (lanes.py).

[Note: heads and lanes]
A message is a head and its tensors. The head (`Content` with its form, `Void`) and what of the tensors is the host's go
over the connections, as without a device (channel.py); tensors of the device go by the lane of these two ranks.

    sender's host       head ── enqueue the send          receiver's host       take the head ── post the receive
    sender's device     compute ──event──> lane: send ─ ─ ─ ─> lane: receive ──event──> compute

The host waits for heads only. It runs ahead of the device, so a receive is mostly posted before its tensors are made.

Rule 1: receives from a rank are posted in the order in which its heads came, which is that of its sends. Whoever takes
        a message posts what has come before it too. So the two ends of a lane always agree on what comes next.
Rule 2: what can go wrong on the host (copies, forms) comes before the first send, and between a head and its sends the
        host waits for nothing. So a lane has the tensors of each head, and no others, also when an action fails.
Rule 3: calls of torch.distributed are the program's thread's, without the lock of the connections.

Why nobody waits for ever: a receive waits for its send, and for earlier receives of its lane. A send waits for earlier
sends of its lane, whose receives are posted before its own, and for what made its tensors: work that was issued before
it, which waits for receives that were posted before that. And a receive is posted only when its head is there, which
was sent together with its send. So the order of calls follows the order in which hosts learn of things, which follows
that of the data: whatever a transfer waits for was posted before its own receive, and there is no circle.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch.distributed as dist
from torch import Tensor

from retrograde.devices import HOST, Stream, Streams
from retrograde.transport.channel import ConnectedChannel
from retrograde.transport.connections import Connections
from retrograde.transport.lanes import Lane, Received, as_bytes, dealt
from retrograde.transport.messages import Address
from retrograde.transport.own_groups import new_group
from retrograde.transport.protocol import Parts, Way


class _Posted(NamedTuple):
    """A content whose receives have been posted."""

    head: Parts
    received: Received


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A message whose head has yet to be taken. Implements `Incoming`."""

    channel: "DeviceChannel"
    peer: int
    address: Address

    def wait(self, stream: Stream) -> Parts | None:
        return self.channel.take(self.peer, self.address, stream)


class DeviceChannel:
    """Implements `Channel` for tensors of a device. Ranks are those of the group."""

    def __init__(self, connections: Connections, streams: Streams, patience: float, ways: Sequence[Way]) -> None:
        self._streams = streams
        self._sending: dict[int, Lane] = {}  # by the other rank
        self._receiving: dict[int, Lane] = {}
        self._open(connections, patience, ways)
        came: deque[tuple[int, Parts]] = deque()
        self._came = came  # sources and heads, whose receives are to be posted
        self._posted: dict[int, _Posted] = {}  # by the identity of the head
        self._heads = ConnectedChannel(connections, HOST, patience, lambda src, head: came.append((src, head)))

    def _open(self, connections: Connections, patience: float, ways: Sequence[Way]) -> None:
        users = connections.group()
        ranks, backend = dist.get_process_group_ranks(users), dist.get_backend(users)
        for together in dealt(ways):
            group = new_group(ranks, backend, patience, len(ranks))
            assert group is not None  # this rank is in it
            for way in together:
                if way.source == connections.rank:
                    self._sending[way.target] = Lane(group, way.target, self._streams.device)
                elif way.target == connections.rank:
                    self._receiving[way.source] = Lane(group, way.source, self._streams.device)
        for way in ways:
            if way.source == connections.rank:
                self._sending[way.target].open(sends=True)
            elif way.target == connections.rank:
                self._receiving[way.source].open(sends=False)

    def send(self, peer: int, address: Address, content: Parts) -> None:
        by_lane = [as_bytes(t) for t in content.tensors if _goes_by_lane(t)]
        beside = [t if t is not None and t.device.type == "cpu" else None for t in content.tensors]
        made = self._streams.current().record()
        self._heads.send(peer, address, Parts(content.form, beside))
        try:
            self._sending[peer].send(by_lane, made)
        except RuntimeError as error:  # the backend has lost the other side
            self._heads.cannot_reach(peer, error)

    def send_void(self, peer: int, address: Address) -> None:
        self._heads.send_void(peer, address)

    def receive(self, peer: int, address: Address) -> _OnItsWay:
        self._heads.receive(peer, address)
        return _OnItsWay(self, peer, address)

    def take(self, peer: int, address: Address, stream: Stream) -> Parts | None:
        """Wait for the head of what comes to an address, and make `stream` wait for its tensors."""
        head = self._heads.take(peer, address)
        if head is None:
            return None
        self._post()
        received = self._posted.pop(id(head)).received
        received.wait(stream)
        tensors = [host if lane is None else lane for host, lane in zip(head.tensors, received.tensors, strict=True)]
        return Parts(head.form, tensors)

    def _post(self) -> None:
        """Post the receives of all heads that have come (Rule 1)."""
        while self._came:
            source, head = self._came.popleft()
            layouts = [None if layout is None or layout.on_host else layout for layout in head.form.tensors]
            self._posted[id(head)] = _Posted(head, self._receiving[source].receive(layouts))


def _goes_by_lane(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.device.type != "cpu" and tensor.numel() > 0
