"""Messages between the stages of different ranks, over the connections of transport/connections.py.

[Note: a message]
A message is one transfer: a head and the tensors of a parcel or of gradients, received in memory of their own. The head
carries their layout only if the same message (channel and microbatch) had another one in the step before; both sides
remember it. Nothing has to be posted: what arrives before its stage asks for it waits.

Rule 1: a failed rank still sends every message of its schedule, with a head that says that it is void, and takes in
        every message it was to receive. No rank waits for one that has failed, and the next step finds nothing old.
Rule 2: a received tensor exists from its arrival until its stage has let go of it; what is sent is held by the
        connection until it has been sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from retrograde.errors import PipelineError
from retrograde.pipeline.parcel import Parcel, as_sent, content_of, form_of, space_for
from retrograde.transport.connections import TIMEOUT, Connections
from retrograde.transport.messages import Address, Content, Form, MessageError, ToReceiver, Void, encode

PATIENCE = 1800.0  # seconds: another rank's first step may compile


class SenderFailed(Exception):
    """The message says that its sender has failed."""


class Unreadable(PipelineError):
    """The message came, and its content cannot be made on this rank."""


Incoming = Callable[[], Any]  # waits for the content and returns it, once; raises `SenderFailed` or `Unreadable`


class StageTransport(Protocol):
    def send(self, peer: int, address: Address, content: Any) -> None: ...

    def send_void(self, peer: int, address: Address) -> None: ...

    def receive(self, peer: int, address: Address) -> Incoming: ...


@dataclass(frozen=True)
class _Arrived:
    """The content of a message that has come, or None for one that is void."""

    form: Form
    tensors: list[Tensor | None]


class MeshTransport:
    """Between the ranks of a process group. Ranks are those of the group."""

    number: int  # given by the mesh

    def __init__(self, group: dist.ProcessGroup, device: torch.device, patience: float = PATIENCE) -> None:
        self._mesh = Connections.of(group, patience)
        self._device = device
        self._patience = patience
        self._sent_forms: dict[Address, bytes] = {}  # as they were sent: 1, 1.0 and True are not the same
        self._forms: dict[Address, Form] = {}
        self._filling: dict[Address, list[Tensor | None]] = {}  # the tensors of a message that is arriving
        self._arrived: dict[Address, deque[_Arrived | None]] = {}
        self.timeout = TIMEOUT
        self._lost: tuple[str, Exception] | None = None
        self._said = False  # has the main thread been told of it?
        self._mesh.attach(self)

    def send(self, peer: int, address: Address, content: Any) -> None:
        form = form_of(content)
        packed = encode(form)
        news = None if packed == self._sent_forms.get(address) else form
        tensors = content.tensors if isinstance(content, Parcel) else content
        data = [as_sent(tensor) for tensor in tensors if tensor is not None]
        self._post(peer, Content(self.number, address, news), data)
        self._sent_forms[address] = packed

    def send_void(self, peer: int, address: Address) -> None:
        self._post(peer, Void(self.number, address))

    def _post(self, peer: int, message: ToReceiver, data: Sequence[Tensor] = ()) -> None:
        try:
            self._mesh.send(peer, message, data=data)
        except OSError as error:
            cause = self._mesh.why_lost(peer)
            self._said = True
            raise PipelineError(f"rank {self._mesh.rank}, sending to pipeline rank {peer}: {cause}") from error

    def receive(self, peer: int, address: Address) -> Incoming:
        return lambda: self._take(peer, address)

    def _take(self, peer: int, address: Address) -> Any:
        waiting = f"rank {self._mesh.rank} waits for the {address} from pipeline rank {peer}"
        departed = self._mesh.departed
        with self._mesh.changed:
            self._mesh.changed.wait_for(
                lambda: self._arrived.get(address) or self._lost or peer in departed, self._patience
            )
            if not self._arrived.get(address):
                if self._lost is None and peer in departed:
                    raise PipelineError(f"{waiting}, which has finished; let all ranks do the same number of steps")
                if self._lost is None:
                    raise PipelineError(f"{waiting}: nothing came in {self._patience:g} s")
                self._said = True
                raise PipelineError(f"{waiting}: {self._lost[0]}") from self._lost[1]
            arrived = self._arrived[address].popleft()
        if arrived is None:
            raise SenderFailed
        try:
            return content_of(arrived.form, arrived.tensors)
        except MessageError as error:
            raise Unreadable(f"rank {self._mesh.rank}, the {address} from pipeline rank {peer}: {error}") from error

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
        made = self._filling[address] = space_for(self._forms[address], nbytes, self._device)
        return [as_sent(tensor) for tensor in made if tensor is not None]

    def on_message(self, src: int, message: ToReceiver, data: Sequence[Tensor]) -> None:
        match message:
            case Content():
                address = message.address
                arrived = _Arrived(self._forms[address], self._filling.pop(address))
                self._arrived.setdefault(address, deque()).append(arrived)
            case Void():
                self._arrived.setdefault(message.address, deque()).append(None)
            case _:
                raise MessageError(f"a {type(message).__name__} was sent to a pipeline")
        self._mesh.changed.notify_all()

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)

    def unsaid(self) -> str | None:
        return None if self._said or self._lost is None else self._lost[0]
