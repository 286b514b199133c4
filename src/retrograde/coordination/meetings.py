"""The meetings of an engine, recorded in the ledger and in profiles, and the tensors that ranks bring to one."""

from collections.abc import Callable

import torch

from retrograde.devices import Streams
from retrograde.labels import labelled
from retrograde.ledger import Activity, Ledger
from retrograde.transport import OrderedTransport, Position, Transport


class Meetings:
    """The meetings of one engine."""

    def __init__(
        self, transport: Transport, ledger: Ledger, streams: Streams, ordered: OrderedTransport | None = None
    ) -> None:
        """`ordered`: the transport, if it has calls in which all ranks take part."""
        self._transport = transport
        self._ledger = ledger
        self._streams = streams
        self._ordered = ordered

    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        """Wait until every rank has come to its next meeting; returns everybody's position, by rank."""
        name = position.reason.name.lower()
        self._ledger.record(Activity.AGREE, name)
        with labelled("meeting:", name):
            return self._transport.meet(position, anew)

    def brings_by_call(self, tensor: torch.Tensor) -> bool:
        """Does the tensor go by a call beside the meeting? In a message the host would have to wait for a device."""
        return self._ordered is not None and not self._streams.on_host and tensor.device == self._streams.device

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """At a meeting, gather the tensors of the ranks that hold this rank's model together,
        all of one form, by shard."""
        assert self._ordered is not None, "tensors go with the meeting's messages"
        current = self._streams.current()
        flat = mine.reshape(-1)
        shards = self._ordered.shards
        gathered = current.empty(shards * flat.numel(), flat.dtype)
        self._ordered.gather_tensors(flat, gathered).wait(current)
        return [each.view(mine.shape) for each in gathered.view(shards, -1).unbind()]
