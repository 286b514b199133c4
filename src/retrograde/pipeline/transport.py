"""Messages between the stages of different ranks, over the connections of comm/mesh.py.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from retrograde.comm import Mesh
from retrograde.errors import PipelineError
from retrograde.pipeline.parcel import Layout, Parcel, TensorLayout, as_sent

PATIENCE = 1800.0  # seconds: another rank's first step may compile


class Address(NamedTuple):
    """One message of a step: what goes `forward` out of, or back into, the output of `stage`."""

    forward: bool
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{'output' if self.forward else 'output gradient'} of stage {self.stage}, microbatch {self.microbatch}"


class Void(Exception):
    """The message says that its sender has failed."""


Incoming = Callable[[], Any]  # waits for the content and returns it, once; raises `Void`


class Transport(Protocol):
    def send(self, peer: int, address: Address, content: Any) -> None: ...

    def send_void(self, peer: int, address: Address) -> None: ...

    def receive(self, peer: int, address: Address) -> Incoming: ...


@dataclass(frozen=True)
class _Form:
    """The layout of a message: of a parcel, or of a list of gradients (no tree)."""

    tensors: tuple[TensorLayout | None, ...]
    tree: Layout | None

    @staticmethod
    def of(content: Any) -> "_Form":
        if isinstance(content, Parcel):
            return _Form(content.layout.tensors, content.layout)
        return _Form(tuple(None if grad is None else TensorLayout.of(grad) for grad in content), None)

    def content(self, tensors: list[Tensor | None]) -> Any:
        return tensors if self.tree is None else Parcel(self.tree, tensors)


class MeshTransport:
    """Between the ranks of a process group. Ranks are those of the group."""

    number: int  # given by the mesh

    def __init__(self, group: dist.ProcessGroup, device: torch.device, patience: float = PATIENCE) -> None:
        self._mesh, self._device, self._patience = Mesh.of(group), device, patience
        self._sent_forms: dict[Address, _Form] = {}
        self._forms: dict[Address, _Form] = {}
        self._filling: dict[Address, list[Tensor | None]] = {}  # the tensors of a message that is arriving
        self._arrived: dict[Address, deque[Any]] = {}
        self._lost: tuple[str, Exception] | None = None
        self._mesh.attach(self)

    def send(self, peer: int, address: Address, content: Any) -> None:
        form = _Form.of(content)
        tensors = content.tensors if isinstance(content, Parcel) else content
        news = None if form == self._sent_forms.get(address) else form
        self._sent_forms[address] = form
        self._post(peer, "content", address, news, data=[as_sent(tensor) for tensor in tensors if tensor is not None])

    def send_void(self, peer: int, address: Address) -> None:
        self._post(peer, "void", address)

    def _post(self, peer: int, op: str, *args: Any, data: list[Tensor] | None = None) -> None:
        try:
            self._mesh.send(peer, op, self.number, *args, data=data or ())
        except OSError as error:
            raise PipelineError(f"rank {self._mesh.rank}: pipeline rank {peer} cannot be reached: {error}") from error

    def receive(self, peer: int, address: Address) -> Incoming:
        return lambda: self._take(peer, address)

    def _take(self, peer: int, address: Address) -> Any:
        waiting = f"rank {self._mesh.rank} waits for the {address} from pipeline rank {peer}"
        with self._mesh.changed:
            if not self._mesh.changed.wait_for(lambda: self._arrived.get(address) or self._lost, self._patience):
                raise PipelineError(f"{waiting}: nothing came in {self._patience:g} s")
            if not self._arrived.get(address):
                assert self._lost is not None
                raise PipelineError(f"{waiting}: {self._lost[0]}") from self._lost[1]
            content = self._arrived[address].popleft()
        if content is None:
            raise Void
        return content

    # ---- the service thread's side
    def room(self, op: str, args: list[Any], nbytes: int) -> list[Tensor]:
        """Where the tensors of a message belong."""
        address, news = args
        form = self._forms[address] = news or self._forms[address]
        made = [None if layout is None else layout.empty(self._device) for layout in form.tensors]
        self._filling[address] = made
        return [as_sent(tensor) for tensor in made if tensor is not None]

    def on_message(self, src: int, op: str, args: tuple[Any, ...]) -> None:
        address = args[0]
        content = None
        if op == "content":
            if address not in self._filling:  # without a byte in its tensors
                self.room(op, list(args[:2]), 0)
            content = self._forms[address].content(self._filling.pop(address))
        self._arrived.setdefault(address, deque()).append(content)
        self._mesh.changed.notify_all()

    def on_lost(self, cause: str, error: Exception) -> None:
        self._lost = (cause, error)
