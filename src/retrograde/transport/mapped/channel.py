"""A pipeline's channel between processes of one host: tensors in shared memory, heads as letters.

The sender copies the tensors of a message into a parcel of its arena and leaves a letter; whoever waits for the message
takes the letter, and copies the tensors out. No thread but these two has to wake up. What has no room goes by the
connection (channel.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from retrograde.transport.channel import ConnectedChannel, Layouts
from retrograde.transport.connections import Connections
from retrograde.transport.mapped.neighbours import Neighbours
from retrograde.transport.messages import Address, Form, Lent, MessageError, ToReceiver
from retrograde.transport.protocol import Parts
from retrograde.transport.tensors import as_sent, space_for


class MappedChannel(ConnectedChannel):
    """Implements `Channel` between processes of one host."""

    def __init__(self, connections: Connections, neighbours: Neighbours, device: torch.device, patience: float) -> None:
        self._neighbours = neighbours
        self._lent_layouts = Layouts()
        super().__init__(connections, device, patience)

    def _transfer(self, peer: int, address: Address, turn: int, form: Form, data: Sequence[Tensor]) -> None:
        if not self._lend(peer, address, turn, form, data):
            super()._transfer(peer, address, turn, form, data)

    def _lend(self, peer: int, address: Address, turn: int, form: Form, data: Sequence[Tensor]) -> bool:
        """Send a message by a parcel and a letter. Returns whether the other rank will find it."""
        in_order = [tensor if tensor.is_contiguous() else as_sent(tensor) for tensor in data]
        place = self._neighbours.parcel(in_order, peer)
        if place is None:
            return False
        message = Lent(self.number, address, turn, self._lent_layouts.news(address, form), place)
        if self._connections.post(peer, message):
            return True
        self._lent_layouts.not_sent(address)
        self._neighbours.parcels.take_back(place)
        return False

    def on_message(self, src: int, message: ToReceiver, data: Sequence[Tensor]) -> None:
        if not isinstance(message, Lent):
            super().on_message(src, message, data)
            return
        self._arrived[message.address, message.turn] = self._copied(src, message)
        self._connections.notify()

    def _copied(self, src: int, message: Lent) -> Parts:
        """Copy the tensors of a message into memory of their own. The parcel is its owner's again after that."""
        if src not in self._neighbours.found:
            raise MessageError("a message was lent in memory that is not mapped")
        form = self._lent_layouts.received(message.address, message.form)
        nbytes = message.place.nbytes
        made = space_for(form, nbytes, self._device)
        arena = self._neighbours.found[src].arena
        at = 0
        try:
            for tensor in made:
                if tensor is not None:
                    arena.copy_out(message.place, at, tensor)
                    at += tensor.nbytes
        finally:
            arena.give_back(message.place, self._connections.rank)
        return Parts(form, made)
