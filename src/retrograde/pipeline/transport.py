"""Messages between the stages of different ranks, on torch.distributed's isend and irecv.

[Note: a message]
A message is a head of a few numbers and the tensors of a parcel or of gradients. Both sides remember the layout
that the same message (channel and microbatch) had in the step before. The receiver posts buffers for that layout
together with the head; while layouts are stable, that is the whole message. If the sender's layout is another one,
the head says so, what it posts in the remembered layout is void, and the new layout and the tensors follow.

Rule 1: every message has tags of its own, so that nothing that follows late can meet another message's buffer.
Rule 2: a failed rank still sends every message of its schedule, with a head that says `VOID`, and receives every
        message it was to receive. No rank waits for one that has failed, and the next step finds clean channels.
Rule 3: a receive buffer exists from its posting until its stage has let go of it; what is sent is held until the
        send has completed (a thread waits for that, since gloo's sends cannot be polled).
"""

import pickle
import queue
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from retrograde.errors import PipelineError
from retrograde.pipeline.parcel import Layout, Parcel, TensorLayout, as_sent

TAGS_PER_MESSAGE = 1024


class State(IntEnum):
    SAME = 0  # the tensors are in the remembered layout
    CHANGED = 1  # a new layout follows, and the tensors after it
    VOID = 2  # the sender has failed


@dataclass(frozen=True, slots=True)
class Address:
    """One message of a step: what goes `forward` out of, or back into, the output of `stage`."""

    forward: bool
    stage: int
    microbatch: int


class Void(Exception):
    """The message says that its sender has failed."""


class Incoming(Protocol):
    def wait(self) -> Any:
        """The content; raises `Void`."""


class Transport(Protocol):
    def send(self, peer: int, address: Address, content: Any) -> None: ...

    def send_void(self, peer: int, address: Address) -> None: ...

    def receive(self, peer: int, address: Address) -> Incoming: ...

    def end_step(self) -> None: ...


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


_NOTHING = _Form((), None)


class TorchTransport:
    """Between the ranks of a process group. Ranks are those of the group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, microbatches: int) -> None:
        self._group, self._device, self._microbatches = group, device, microbatches
        self._known: dict[tuple[Address, bool], _Form] = {}  # by address and whether we send it
        self._reaper = _Reaper()

    def send(self, peer: int, address: Address, content: Any) -> None:
        form, known = _Form.of(content), self._known.get((address, True), _NOTHING)
        tensors = content.tensors if isinstance(content, Parcel) else content
        payload = [as_sent(tensor) for tensor in tensors if tensor is not None]
        tag = self._tag(address)
        if form == known:
            self._post(dist.isend, peer, tag, [self._head(State.SAME), *payload])
            return
        packed = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8).to(self._device)
        self._post(dist.isend, peer, tag, [self._head(State.CHANGED, packed.numel()), *self._buffers(known)])
        self._post(dist.isend, peer, tag + TAGS_PER_MESSAGE // 2, [packed, *payload])
        self._known[address, True] = form

    def send_void(self, peer: int, address: Address) -> None:
        known = self._known.get((address, True), _NOTHING)
        self._post(dist.isend, peer, self._tag(address), [self._head(State.VOID), *self._buffers(known)])

    def receive(self, peer: int, address: Address) -> "_Receiving":
        return _Receiving(self, peer, address)

    def end_step(self) -> None:
        """Everything that was sent has arrived. Collective in effect: the others have received it."""
        self._reaper.settle()

    # ---- for _Receiving
    def known(self, address: Address) -> _Form:
        return self._known.get((address, False), _NOTHING)

    def learn(self, address: Address, form: _Form) -> None:
        self._known[address, False] = form

    def post_head(self, peer: int, address: Address) -> tuple[Tensor, list[Tensor], list[dist.Work]]:
        head, buffers = self._head(State.VOID), self._buffers(self.known(address))
        return head, buffers, self._post(dist.irecv, peer, self._tag(address), [head, *buffers])

    def fetch(self, peer: int, address: Address, nbytes: int) -> tuple[_Form, list[Tensor]]:
        """The new layout and the tensors that follow a head that says CHANGED."""
        tag = self._tag(address) + TAGS_PER_MESSAGE // 2
        packed = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        _wait(self._post(dist.irecv, peer, tag, [packed]))
        form: _Form = pickle.loads(packed.cpu().numpy().tobytes())
        buffers = self._buffers(form)
        _wait(self._post(dist.irecv, peer, tag + 1, buffers))
        return form, buffers

    def _tag(self, address: Address) -> int:
        number = (address.stage * self._microbatches + address.microbatch) * 2 + address.forward
        return number * TAGS_PER_MESSAGE

    def _head(self, state: State, nbytes: int = 0) -> Tensor:
        return torch.tensor([state, nbytes], dtype=torch.int64, device=self._device)

    def _buffers(self, form: _Form) -> list[Tensor]:
        return [layout.empty(self._device) for layout in form.tensors if layout is not None]

    def _post(self, op: Any, peer: int, tag: int, tensors: list[Tensor]) -> list[dist.Work]:
        if len(tensors) >= TAGS_PER_MESSAGE // 2:
            raise PipelineError(f"{len(tensors)} tensors between two stages; at most {TAGS_PER_MESSAGE // 2 - 1}")
        flat = [as_sent(tensor) for tensor in tensors]
        ops = [
            dist.P2POp(op, tensor, group=self._group, group_peer=peer, tag=tag + number)
            for number, tensor in enumerate(flat)
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        if op is dist.isend:
            self._reaper.watch(works, flat)
        return works


class _Receiving:
    """A posted receive. Its buffers are handed out once."""

    def __init__(self, transport: TorchTransport, peer: int, address: Address) -> None:
        self._transport, self._peer, self._address = transport, peer, address
        self._head, self._buffers, self._works = transport.post_head(peer, address)

    def wait(self) -> Any:
        _wait(self._works)
        state, nbytes = self._head.tolist()
        form, buffers = self._transport.known(self._address), self._buffers
        self._buffers = []
        if state == State.VOID:
            raise Void
        if state == State.CHANGED:
            del buffers
            form, buffers = self._transport.fetch(self._peer, self._address, nbytes)
            self._transport.learn(self._address, form)
        rest = iter(buffers)
        tensors = [None if layout is None else next(rest) for layout in form.tensors]
        return tensors if form.tree is None else Parcel(form.tree, tensors)


def _wait(works: list[dist.Work]) -> None:
    """Each exactly once: gloo writes the output again at a second wait."""
    while works:
        works.pop(0).wait()


class _Reaper:
    """Holds what is being sent until it has been sent."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[list[dist.Work], list[Tensor]] | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def watch(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipeline sends", daemon=True)
            self._thread.start()
        self._queue.put((works, tensors))

    def settle(self) -> None:
        """Wait until all that was handed over so far has been sent."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise PipelineError(f"a send between pipeline stages failed: {error}") from error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                try:
                    _wait(item[0])
                except Exception as error:  # told to the main thread at the end of the step
                    self._error = error
            del item
