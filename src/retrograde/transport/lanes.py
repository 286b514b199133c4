"""Tensors from one device to another, by single sends and receives of torch.distributed.

[Note: lanes]
A *lane* is a way from one rank to another, with a process group and a stream on either side. What goes along it arrives
in the order in which it was sent, and nothing else is on it.

Rule 1: in a group a rank has one lane, so that what it sends to one rank never waits for another. A backend may run all
        calls of a group one after the other (NCCL does, if its communicators are made eagerly); then two ranks that
        send to each other, or three in a circle, would wait for ever. So ways are dealt out over groups: two groups for
        two ranks, four for a line of them.
Rule 2: communicators are made when the pipeline is: where one is made by its first call, that call waits for the other
        side, and nothing may wait in a step. So every lane carries one byte first, in an order that all ranks share.
Rule 3: tensors go as bytes, which every backend has. Those without elements do not go.
Rule 4: the sender's stream waits for the event of what made the tensors, and holds their memory until they have gone.
        Memory to receive in is the receiver's stream's own: else the transfer would wait for what users compute.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from retrograde.devices import Event, Stream, another_stream
from retrograde.transport.messages import TensorLayout
from retrograde.transport.protocol import Way
from retrograde.transport.tensors import as_sent, empty


def dealt(ways: Sequence[Way]) -> list[list[Way]]:
    """The ways of each group: of one group no two share a rank (Rule 1)."""
    groups: list[list[Way]] = []
    for way in ways:
        free = (group for group in groups if not any(set(way) & set(other) for other in group))
        chosen = next(free, None)
        if chosen is None:
            groups.append([way])
        else:
            chosen.append(way)
    return groups


class Lane:
    """One end of a lane."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = peer  # its rank in the group
        self._device = device
        self._stream = another_stream(device)

    def send(self, tensors: Sequence[Tensor], made: Event) -> None:
        """Enqueue the sends of tensors; `made` is the event of their producer.
        The caller may let go of them at once."""
        self._stream.wait(made)
        for tensor in tensors:
            self._call(dist.isend, tensor, group_dst=self._peer)
            self._stream.hold(tensor)

    def receive(self, layouts: Sequence[TensorLayout | None]) -> "Received":
        """Enqueue the receives of those tensors that have layouts."""
        tensors: list[Tensor | None] = []
        self._stream.run(
            lambda: tensors.extend(None if each is None else empty(each, self._device) for each in layouts)
        )
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self._call(dist.irecv, as_bytes(tensor), group_src=self._peer)
        return Received(tensors, self._stream.record())

    def open(self, sends: bool) -> None:
        """Carry one byte, so that the backend makes its communicator now (Rule 2)."""
        byte = self._stream.empty(1, torch.uint8)
        if sends:
            self._stream.run(byte.zero_)
            self._call(dist.isend, byte, group_dst=self._peer)
        else:
            self._call(dist.irecv, byte, group_src=self._peer)

    def _call(self, call: Callable[..., dist.Work | None], tensor: Tensor, **peer: int) -> None:
        """Make a call on the lane's stream, which waits for its end: what is recorded there later comes after it."""

        def enqueue() -> None:
            work = call(tensor, group=self._group, **peer)
            assert work is not None  # this rank is in the group
            work.wait()

        self._stream.run(enqueue)


class Received:
    """Tensors that are received, and the event after which they are there."""

    def __init__(self, tensors: list[Tensor | None], there: Event) -> None:
        self.tensors = tensors
        self._there = there

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait: what is issued on it from now on finds the tensors there."""
        stream.wait(self._there)
        for tensor in self.tensors:
            if tensor is not None:
                stream.hold(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as bytes, in order;
    a copy only if it has gaps, or if torch has left a conjugation to be done."""
    return as_sent(tensor.detach().resolve_conj().resolve_neg()).view(torch.uint8)
