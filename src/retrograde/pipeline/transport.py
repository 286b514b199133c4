"""Messages between stages of different ranks, over a channel (transport/protocol.py).

Rule 1: a failed rank still sends every message of its schedule, as a void one, and takes in every message it was to
        receive. So no rank waits for one that has failed, and the next step finds no old messages.
"""

from collections.abc import Callable
from typing import Any

from retrograde.devices import Streams
from retrograde.errors import PipelineError
from retrograde.pipeline.payload import Payload, content_of, form_of
from retrograde.transport import Channel, Parts
from retrograde.transport.messages import Address, MessageError

ReceiveContent = Callable[[], Any]  # waits for the content and returns it, once; raises SenderFailed or Unreadable


class SenderFailed(Exception):
    """The message is void: its sender has failed."""


class Unreadable(PipelineError):
    """The message came, but this rank cannot make its content."""


class StageTransport:
    """Sends payloads and gradients between stages, and receives them."""

    def __init__(self, channel: Channel, rank: int, streams: Streams) -> None:
        self.channel = channel
        self._rank = rank
        self._streams = streams

    def send(self, peer: int, address: Address, content: Any) -> None:
        tensors = content.tensors if isinstance(content, Payload) else content
        self.channel.send(peer, address, Parts(form_of(content), tensors))

    def send_void(self, peer: int, address: Address) -> None:
        self.channel.send_void(peer, address)

    def receive(self, peer: int, address: Address) -> ReceiveContent:
        incoming = self.channel.receive(peer, address)

        def content() -> Any:
            parts = incoming.wait(self._streams.current())
            if parts is None:
                raise SenderFailed
            try:
                return content_of(parts.form, parts.tensors)
            except MessageError as error:
                raise Unreadable(f"rank {self._rank}, the {address} from pipeline rank {peer}: {error}") from error

        return content
