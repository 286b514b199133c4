"""A pipeline's channel between processes: messages between its stages, over connections (connections.py).

[Note: a message of a pipeline]
A message is one transfer: a head and the tensors, received in memory of their own. The head carries their layout only
if the same message (address) had another one in the step before; both sides remember it. Nothing has to be posted:
what arrives before its stage asks for it waits. A received tensor exists from its arrival until its stage has let go of
it; what is sent is held by the connection until it has been sent.

Within a host messages go by another way (transport/mapped/channel.py), unless there is no room on it. So one may
overtake another: messages to an address are numbered, and taken in turn.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

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
    """A message that is to come to an address. Implements `Incoming`."""

    channel: "ConnectedChannel"
    peer: int
    address: Address

    def wait(self, stream: Stream) -> Parts | None:
        """Wait for the message.
        Its memory is the host's, so nothing is left to be ordered on a stream when the bytes are there."""
        return self.channel.take(self.peer, self.address)


class _Sent(NamedTuple):
    """A layout that the other end knows. Bytes are compared, since 1, 1.0 and True are not the same."""

    form: Form
    packed: bytes


class Layouts:
    """The last layout of each address, as both ends of one way remember it."""

    def __init__(self) -> None:
        self._sent: dict[Address, _Sent] = {}
        self._received: dict[Address, Form] = {}

    def news(self, address: Address, form: Form) -> Form | None:
        """The layout, if it has to be sent; None if the other end knows it.
        From now on the other end is taken to know it."""
        known = self._sent.get(address)
        if known is not None and known.form is form:
            return None
        packed = encode(form)
        self._sent[address] = _Sent(form, packed)
        return None if known is not None and known.packed == packed else form

    def not_sent(self, address: Address) -> None:
        """Note that the layout did not go this way after all, so that the next message carries it."""
        self._sent.pop(address, None)

    def received(self, address: Address, form: Form | None) -> Form:
        """The layout of what came to an address with this news of it."""
        if form is not None:
            self._received[address] = form
        if address not in self._received:
            raise MessageError(f"the {address} came without a layout")
        return self._received[address]


class ConnectedChannel:
    """Implements `Channel`, and `Receiver` for the connections. Ranks are those of the group."""

    number: int  # given by the connections
    timeout = TIMEOUT  # seconds for which a rank that has finished waits for others that ask for nothing

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
        self._layouts = Layouts()
        self._sent: defaultdict[Address, int] = defaultdict(int)  # how many messages
        self._taken: defaultdict[Address, int] = defaultdict(int)
        self._filling: dict[tuple[Address, int], Parts] = {}  # messages that are arriving, by address and turn
        self._arrived: dict[tuple[Address, int], Parts | None] = {}  # None: its sender has failed
        self._lost: tuple[str, Exception] | None = None
        self._said = False  # has the main thread been told what was lost?
        connections.attach(self)

    def send(self, peer: int, address: Address, content: Parts) -> None:
        data = [tensor for tensor in content.tensors if tensor is not None]
        self._transfer(peer, address, self._turn(address), content.form, data)

    def _transfer(self, peer: int, address: Address, turn: int, form: Form, data: Sequence[Tensor]) -> None:
        sent = [as_sent(tensor) for tensor in data]
        self._post(peer, Content(self.number, address, turn, self._layouts.news(address, form)), sent)

    def send_void(self, peer: int, address: Address) -> None:
        self._post(peer, Void(self.number, address, self._turn(address)))

    def _turn(self, address: Address) -> int:
        turn = self._sent[address]
        self._sent[address] += 1
        return turn

    def _post(self, peer: int, message: ToReceiver, data: Sequence[Tensor] = ()) -> None:
        try:
            self._connections.send(peer, message, data=data)
        except OSError as error:
            self.cannot_reach(peer, error)

    def cannot_reach(self, peer: int, error: Exception) -> NoReturn:
        """Raise an error with its cause: nothing can be sent to a rank."""
        cause = self._connections.why_lost(peer)
        self._said = True
        here, there = map(self._connections.name_of, (self._connections.rank, peer))
        raise PipelineError(f"{here}, sending to pipeline {there}: {cause}") from error

    def receive(self, peer: int, address: Address) -> _Awaited:
        self._connections.listen_to(peer)
        return _Awaited(self, peer, address)

    def take(self, peer: int, address: Address) -> Parts | None:
        """Wait for what comes to an address. None: its sender has failed."""
        changed, departed = self._connections.changed, self._connections.departed
        awaited = (address, self._taken[address])

        def over() -> bool:
            return awaited in self._arrived or self._lost is not None or peer in departed

        with changed:
            self._connections.wait_until(over, self._patience)
            if awaited not in self._arrived:
                self._fail(peer, address)
            self._taken[address] += 1
            return self._arrived.pop(awaited)

    def _fail(self, peer: int, address: Address) -> None:
        """Raise an error: nothing has come to an address, and nothing will."""
        here, there = map(self._connections.name_of, (self._connections.rank, peer))
        waiting = f"{here} waits for the {address} from pipeline {there}"
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
        form = self._layouts.received(message.address, message.form)
        made = Parts(form, space_for(form, nbytes, self._device))
        self._filling[message.address, message.turn] = made
        return [as_sent(tensor) for tensor in made.tensors if tensor is not None]

    def on_message(self, src: int, message: ToReceiver, data: Sequence[Tensor]) -> None:
        match message:
            case Content():
                arrived = self._filling.pop((message.address, message.turn))
                self._arrived[message.address, message.turn] = arrived
                if self._came is not None:
                    self._came(src, arrived)
            case Void():
                self._arrived[message.address, message.turn] = None
            case _:
                raise MessageError(f"a {type(message).__name__} was sent to a pipeline")
        self._connections.notify()

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)

    def unsaid(self) -> str | None:
        return None if self._said or self._lost is None else self._lost[0]
