"""One connection to another rank: messages as frames of bytes.

A frame is two lengths, a message (messages.py), and the bytes of the tensors that go with it. Tensors are sent from
where they are in memory and received where they belong. Lengths are checked before memory is taken for what they
announce.
"""

import contextlib
import selectors
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from retrograde.transport.messages import Message, MessageError, encode

LENGTHS = struct.Struct("<QQ")  # bytes of the message, bytes of the tensors
LIMIT = 2**26  # bytes of a message: names of a million parameters, and far less than memory
_SCRATCH = 2**20  # bytes at a time of what nobody wants
_PARTS = 64  # pieces of memory for one system call


def bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg()  # torch may have left a conjugation to be done when it is read
    return plain.reshape(-1).view(torch.uint8).numpy().data


def frame(message: Message, data: Sequence[torch.Tensor] = ()) -> list[memoryview]:
    """What is to be sent, in pieces."""
    head = encode(message)
    if len(head) > LIMIT:
        raise MessageError(f"a message of {len(head)} bytes; at most {LIMIT} can be sent")
    parts = [bytes_of(tensor) for tensor in data if tensor.numel()]
    lengths = LENGTHS.pack(len(head), sum(map(len, parts)))
    return [memoryview(lengths + head), *parts]


def message_length(announced: int) -> int:
    """The length of a message that comes, if it can be one."""
    if not 0 < announced <= LIMIT:
        raise MessageError(f"a message of {announced} bytes was announced; messages have 1 to {LIMIT}")
    return announced


def unwanted(nbytes: int) -> Iterator[memoryview]:
    """Memory for bytes that nobody wants, a little at a time."""
    scratch = memoryview(bytearray(min(nbytes, _SCRATCH)))
    while nbytes:
        taken = min(nbytes, _SCRATCH)
        yield scratch[:taken]
        nbytes -= taken


class Line:
    """The connection to one rank: what has been received of a message, and what is still to be sent.

    `incoming` gives memory to be filled, piece by piece; it is asked for more when a piece is full.
    """

    def __init__(
        self, peer: int, sock: socket.socket, selector: selectors.BaseSelector, incoming: Iterator[memoryview]
    ) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.peer = peer
        self.socket = sock
        self.queued = 0  # bytes that were given to `send` so far
        self.sent = 0  # bytes that the connection has taken so far
        self._selector = selector
        self._lock = threading.Lock()
        self._incoming = incoming
        self._into = next(incoming)
        self._out: deque[memoryview] = deque()
        self._closed = False
        selector.register(sock, selectors.EVENT_READ, self)

    def send(self, parts: Sequence[memoryview] = ()) -> int:
        """Send what goes at once, of these parts and those before; the selector tells when more can.

        What it returns is reached by `sent` when all of it has gone."""
        with self._lock:
            self._out += parts
            self.queued += sum(map(len, parts))
            try:
                while self._out:
                    self._send_some()
            except BlockingIOError:
                pass  # the rest goes when there is room
            except OSError:
                self._out.clear()  # nobody reads it. What the other side said before it closed is still to be read
                self.sent = sys.maxsize
                raise
            finally:
                self._watch()
            return self.queued

    def _watch(self) -> None:
        if not self._closed:
            writing = selectors.EVENT_WRITE if self._out else 0
            self._selector.modify(self.socket, selectors.EVENT_READ | writing, self)

    def _send_some(self) -> None:
        gone = self.socket.sendmsg([self._out[i] for i in range(min(len(self._out), _PARTS))])
        self.sent += gone
        while self._out and gone >= len(self._out[0]):
            gone -= len(self._out.popleft())
        if gone:
            self._out[0] = self._out[0][gone:]

    def receive(self) -> None:
        """Take in what has come; raises when the other side has closed the connection."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PARTS):  # then it is another line's turn
                got = self.socket.recv_into(self._into)
                if not got:
                    raise ConnectionResetError("the other side has closed the connection")
                rest = self._into[got:] if got < len(self._into) else None
                self._into = memoryview(b"")  # a complete message is delivered: its memory must be let go of here
                self._into = next(self._incoming) if rest is None else rest

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._selector.unregister(self.socket)
            self.socket.close()
            self.sent = sys.maxsize  # nobody reads what was not sent
