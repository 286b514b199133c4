"""A pipeline's channel between processes: messages between its stages, over connections (connections.py).

[Note: a message of a pipeline]
A message is one transfer: a head and the tensors, received in memory of their own. The head carries their layout only
if the same message (address) had another one in the step before; both sides remember it. Nothing has to be posted:
what arrives before its stage asks for it waits. A received tensor exists from its arrival until its stage has let go of
it; what is sent is held by the connection until it has been sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from retrograde.devices import Stream
from retrograde.errors import PipelineError
from retrograde.transport.connections import TIMEOUT, Connections
from retrograde.transport.messages import Address, Content, Form, MessageError, ToReceiver, Void, encode
from retrograde.transport.protocol import Parts
from retrograde.transport.tensors import as_sent, space_for


@dataclass(frozen=True, slots=True)
class _Awaited:
    """What is to come to an address. Implements `Incoming`."""

    channel: "ConnectedChannel"
    peer: int
    address: Address

    def wait(self, stream: Stream) -> Parts | None:
        """Memory is the host's, so nothing is left to be ordered on a stream when the bytes are there."""
        return self.channel.take(self.peer, self.address)


class ConnectedChannel:
    """Implements `Channel`, and `Receiver` for the connections. Ranks are those of the group."""

    number: int  # given by the connections
    timeout = TIMEOUT  # for which a rank that has finished waits for others that ask for nothing

    def __init__(
        self,
        connections: Connections,
        device: torch.device,
        patience: float,
        came: Callable[[int, Parts], None] | None = None,
    ) -> None:
        """`came` is told of each content and its sender, with `changed` held: in the order in which it was sent."""
        self._connections = connections
        self._came = came
        self._device = device
        self._patience = patience
        self._sent_forms: dict[Address, bytes] = {}  # as they were sent: 1, 1.0 and True are not the same
        self._forms: dict[Address, Form] = {}
        self._filling: dict[Address, list[Tensor | None]] = {}  # the tensors of a message that is arriving
        self._arrived: dict[Address, deque[Parts | None]] = {}  # None: its sender has failed
        self._lost: tuple[str, Exception] | None = None
        self._said = False  # has the main thread been told of it?
        connections.attach(self)

    def send(self, peer: int, address: Address, content: Parts) -> None:
        packed = encode(content.form)
        news = None if packed == self._sent_forms.get(address) else content.form
        data = [as_sent(tensor) for tensor in content.tensors if tensor is not None]
        self._post(peer, Content(self.number, address, news), data)
        self._sent_forms[address] = packed

    def send_void(self, peer: int, address: Address) -> None:
        self._post(peer, Void(self.number, address))

    def _post(self, peer: int, message: ToReceiver, data: Sequence[Tensor] = ()) -> None:
        try:
            self._connections.send(peer, message, data=data)
        except OSError as error:
            self.cannot_reach(peer, error)

    def cannot_reach(self, peer: int, error: Exception) -> NoReturn:
        """Nothing can be sent to a rank: raise, with its cause."""
        cause = self._connections.why_lost(peer)
        self._said = True
        raise PipelineError(f"rank {self._connections.rank}, sending to pipeline rank {peer}: {cause}") from error

    def receive(self, peer: int, address: Address) -> _Awaited:
        self._connections.listen_to(peer)
        return _Awaited(self, peer, address)

    def take(self, peer: int, address: Address) -> Parts | None:
        """Wait for what comes to an address."""
        changed, departed = self._connections.changed, self._connections.departed

        def over() -> bool:
            return bool(self._arrived.get(address)) or self._lost is not None or peer in departed

        with changed:
            self._connections.wait_until(over, self._patience)
            if not self._arrived.get(address):
                self._fail(peer, address)
            return self._arrived[address].popleft()

    def _fail(self, peer: int, address: Address) -> None:
        """Nothing has come, and nothing will."""
        waiting = f"rank {self._connections.rank} waits for the {address} from pipeline rank {peer}"
        if self._lost is not None:
            self._said = True
            raise PipelineError(f"{waiting}: {self._lost[0]}") from self._lost[1]
        if peer in self._connections.departed:
            raise PipelineError(f"{waiting}, which has finished; let all ranks do the same number of steps")
        raise PipelineError(f"{waiting}: nothing came in {self._patience:g} s")

    # ---- the service thread's side
    def destination(self, src: int, message: ToReceiver, nbytes: int) -> Sequence[Tensor] | None:
        """Where the tensors of a message belong."""
        if not isinstance(message, Content):
            return ()
        address = message.address
        if message.form is not None:
            self._forms[address] = message.form
        if address not in self._forms:
            raise MessageError(f"the {address} came without a layout")
        made = space_for(self._forms[address], nbytes, self._device)
        self._filling[address] = made
        return [as_sent(tensor) for tensor in made if tensor is not None]

    def on_message(self, src: int, message: ToReceiver, data: Sequence[Tensor]) -> None:
        match message:
            case Content():
                address = message.address
                arrived = Parts(self._forms[address], self._filling.pop(address))
                self._arrived.setdefault(address, deque()).append(arrived)
                if self._came is not None:
                    self._came(src, arrived)
            case Void():
                self._arrived.setdefault(message.address, deque()).append(None)
            case _:
                raise MessageError(f"a {type(message).__name__} was sent to a pipeline")
        self._connections.notify()

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)

    def unsaid(self) -> str | None:
        return None if self._said or self._lost is None else self._lost[0]
