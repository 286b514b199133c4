"""The sockets between this rank and all others, of ZeroMQ: who may use them, and who is at the other end.

[Note: wires]
Each rank has two wires. A wire is a socket by which others reach this rank and one by which it reaches them, connected
to another rank when there is first something for it. So what a pair of ranks says to each other goes by two
connections, one for each direction, and no rank needs to know who called whom.

    rank 0   ROUTER ──────── CURVE, all messages ────────> DEALER   rank 1
             ROUTER ── PLAIN, bytes of large tensors ────> DEALER

control: encrypted, and each side knows the other's key from the group's store. Who it is that sends a message is known
         from the key, not from what the message says.
bulk:    not encrypted, which would cost three times the processor time (docs/design/communication.md). A caller
         must know the receiver's secret, which was in the store too. Its bytes are never more than the contents of
         memory that a message by the control wire has announced.

Connections are not made again: one that is lost is a rank that is lost.

Rule 1: `send` may be called by any thread, one at a time (`_sending`); the rest is the service thread's.
Rule 2: nobody waits in order to send. What is to be sent is kept by ZeroMQ, tensors where they are in memory.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from retrograde.transport.envelope import INLINE, LENGTHS, LIMIT, pieces
from retrograde.transport.messages import Contact, Message, TcpAddress, UnixAddress

CHUNK = 2**21  # bytes of a tensor at a time
_WAITING = 8  # chunks of one rank; then it has to wait until the service thread has taken some
_CALLERS = 4096  # that have not been heard yet
HANDSHAKE = 10_000  # milliseconds for a caller to show who it is
HEARTBEAT = 10_000  # milliseconds
SILENCE = 60_000  # milliseconds after which a host that answers no heartbeat is lost
_AT_ONCE = 64  # messages; then it is the other sockets' turn
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks who may come in (its RFC 27)

WireAddress = UnixAddress | TcpAddress
_SENT = zmq.MessageTracker()  # nothing is lent any more


class Sending(Protocol):
    """Tensors that have been given to `send`."""

    @property
    def done(self) -> bool:
        """May the tensors change again?"""


class Came(NamedTuple):
    """Something from another rank: an envelope, or bytes of a tensor that came apart from it."""

    src: int
    data: memoryview
    bulk: bool


class Lost(NamedTuple):
    """A rank cannot be reached any more."""

    peer: int


class _Curve:
    """The security of the control wire: both sides have keys."""

    def __init__(self) -> None:
        self.public, self._secret = zmq.curve_keypair()

    def answer(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self._secret

    def call(self, socket: "zmq.Socket[bytes]", contact: Contact) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self._secret
        socket.curve_serverkey = contact.key


class _Plain:
    """The security of the bulk wire: the caller says its rank and the secret of the rank that it calls."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.secret = secrets.token_hex(16).encode()

    def answer(self, socket: "zmq.Socket[bytes]") -> None:
        socket.plain_server = True

    def call(self, socket: "zmq.Socket[bytes]", contact: Contact) -> None:
        socket.plain_username = str(self._rank).encode()
        socket.plain_password = contact.secret


class _Wire:
    """A socket by which others reach this rank, and one by which it reaches them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", mechanism: _Curve | _Plain, most: int) -> None:
        """`most`: the bytes that a message may have; who sends more is disconnected."""
        self._mechanism = mechanism
        self._calls: dict[int, str] = {}  # the endpoints of the ranks that it has called
        self._called: dict[str, int] = {}  # ranks by these endpoints
        self.incoming = self._socket(context, zmq.DEALER)
        self.incoming.maxmsgsize = most
        self.incoming.backlog = _CALLERS
        mechanism.answer(self.incoming)
        self.outgoing = self._socket(context, zmq.ROUTER)
        self.outgoing.router_mandatory = True  # what cannot be sent is an error
        self.outgoing.sndhwm = 0  # Rule 2
        self.outgoing.rcvhwm = 1  # nobody answers by the way by which he was called
        self.outgoing.reconnect_ivl = -1
        self.losses = self.outgoing.get_monitor_socket(_LOST)

    @staticmethod
    def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
        made = context.socket(kind)
        made.handshake_ivl = HANDSHAKE
        made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = HEARTBEAT, SILENCE, SILENCE
        return made

    def listen(self, host: str | None) -> WireAddress:
        """Listen at a name without a file, which only this kernel knows, or at a port of `host`."""
        if host is None:
            unix = UnixAddress("@retrograde-" + secrets.token_hex(16))
            self.incoming.bind(unix.endpoint)
            return unix
        self.incoming.ipv6 = ":" in host
        port = self.incoming.bind_to_random_port(TcpAddress(host, 0).endpoint.removesuffix(":0"))
        return TcpAddress(host, port)

    def call(self, peer: int, address: WireAddress, contact: Contact) -> None:
        """Connect to a rank, once."""
        if peer in self._calls:
            return
        self._calls[peer], self._called[address.endpoint] = address.endpoint, peer
        self._mechanism.call(self.outgoing, contact)
        self.outgoing.ipv6 = "[" in address.endpoint
        self.outgoing.setsockopt(zmq.CONNECT_ROUTING_ID, _route(peer))
        self.outgoing.connect(address.endpoint)

    def send(self, peer: int, data: bytes) -> None:
        self.outgoing.send(_route(peer), zmq.SNDMORE | zmq.NOBLOCK)
        self.outgoing.send(data, zmq.NOBLOCK)

    def lend(self, peer: int, data: memoryview) -> zmq.MessageTracker:
        """Send data from where they are in memory."""
        self.outgoing.send(_route(peer), zmq.SNDMORE | zmq.NOBLOCK)
        tracker = self.outgoing.send(data, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        return tracker

    def hang_up(self, peer: int) -> None:
        if peer in self._calls:
            with contextlib.suppress(zmq.ZMQError):  # it is lost already
                self.outgoing.disconnect(self._calls[peer])

    def whom_it_lost(self) -> int:
        return self._called[recv_monitor_message(self.losses)["endpoint"].decode()]

    def close(self, linger: int) -> None:
        self.incoming.close(0)
        self.outgoing.close(linger)
        self.losses.close(0)


def _route(peer: int) -> bytes:
    return b"rank %d" % peer  # not a number alone: ZeroMQ gives names that begin with a zero byte itself


class Wires:
    """This rank's two wires. They are open to nobody until `admit` has said who the other ranks are."""

    def __init__(self, rank: int, host: str | None) -> None:
        self.sent = 0  # bytes of messages and tensors
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 64
        self._context.linger = 0
        self._curve, self._plain = _Curve(), _Plain(rank)
        self._doors = self._context.socket(zmq.REP)
        self._doors.bind(_ZAP)
        self._control = _Wire(self._context, self._curve, LENGTHS.size + LIMIT + INLINE)
        self._bulk = _Wire(self._context, self._plain, CHUNK)
        self._bulk.incoming.rcvhwm = _WAITING
        addresses = self._control.listen(host), self._bulk.listen(host)
        self.contact = Contact(self._curve.public, self._plain.secret, *addresses)
        self._contacts: Mapping[int, Contact] = {}
        self._ranks: dict[bytes, bytes] = {}  # by key
        self._sending = threading.Lock()
        self._lost: set[int] = set()
        self._closed = False
        # Starts pyzmq's thread for memory that is lent, while threads can still be started.
        zmq.Frame(bytearray(zmq.COPY_THRESHOLD), copy=False)
        self._bell, self._ear = socket.socketpair()  # to wake the service thread
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._poller, self._without_bulk = zmq.Poller(), zmq.Poller()
        watched = (self._ear, self._doors, self._control.incoming, self._control.losses, self._bulk.losses)
        for poller in (self._poller, self._without_bulk):
            for each in watched:
                poller.register(each, zmq.POLLIN)
        self._poller.register(self._bulk.incoming, zmq.POLLIN)

    @property
    def spans_hosts(self) -> bool:
        return isinstance(self.contact.control, TcpAddress)

    def admit(self, contacts: Mapping[int, Contact]) -> None:
        """Open the wires to the other ranks, which these are."""
        self._contacts = contacts
        self._ranks = {z85.decode(contact.key): str(peer).encode() for peer, contact in contacts.items()}

    # ---- sending
    def send(self, peer: int, message: Message, data: Sequence[torch.Tensor] = ()) -> Sending:
        """Send a message and its tensors to another rank's service thread. Raises OSError if it cannot be reached."""
        head, *parts = pieces(message, data)
        nbytes = sum(map(len, parts))
        with self._sending:
            if self._closed or peer in self._lost:
                raise ConnectionResetError(f"there is no connection to rank {peer} any more")
            self.sent += len(head) + nbytes
            contact = self._contacts[peer]
            try:
                self._control.call(peer, contact.control, contact)
                if nbytes <= INLINE:
                    self._control.send(peer, b"".join([head, *parts]))
                    return _SENT
                self._control.send(peer, bytes(head))
                self._bulk.call(peer, contact.bulk, contact)
                return zmq.MessageTracker(*(self._bulk.lend(peer, chunk) for part in parts for chunk in _chunks(part)))
            except zmq.ZMQError as error:
                raise ConnectionResetError(error.errno, f"rank {peer} cannot be reached: {error}") from error

    def call(self, peer: int) -> None:
        """Connect to a rank without a word, so that its end is noticed."""
        with self._sending:
            if not self._closed:
                self._control.call(peer, self._contacts[peer].control, self._contacts[peer])

    def hang_up(self, peer: int) -> None:
        """Send nothing more to this rank, but what has been given to `send`."""
        with self._sending:
            self._lost.add(peer)
            self._control.hang_up(peer)
            self._bulk.hang_up(peer)

    # ---- the service thread
    def ring(self) -> None:
        """Let `wait` return. May be called anywhere."""
        with contextlib.suppress(OSError):  # it is closed, or has been rung often enough
            self._bell.send(b".")

    def wait(self, seconds: float | None, bulk: bool = True) -> list[Came | Lost]:
        """Wait for what comes, at most for so many seconds. Without `bulk`, chunks stay where they are."""
        poller = self._poller if bulk else self._without_bulk
        ready = dict(poller.poll(None if seconds is None else round(1000 * seconds)))
        if self._ear.fileno() in ready:
            self._ear.recv(4096)
        if self._doors in ready:
            self._open_door()
        came: list[Came | Lost] = []
        for wire in (self._control, self._bulk):
            if wire.incoming in ready:
                came += self._received(wire)
        for wire in (self._control, self._bulk):
            if wire.losses in ready:  # after what came before it was lost
                came.append(self._note_loss(wire.whom_it_lost()))
        return came

    def _received(self, wire: _Wire) -> list[Came]:
        came: list[Came] = []
        most = _WAITING if wire is self._bulk else _AT_ONCE
        while len(came) < most and int(wire.incoming.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frame = wire.incoming.recv(zmq.NOBLOCK, copy=False)
            came.append(Came(int(frame.get("User-Id")), frame.buffer, wire is self._bulk))
        return came

    def _note_loss(self, peer: int) -> Lost:
        with self._sending:
            self._lost.add(peer)
        return Lost(peer)

    def _open_door(self) -> None:
        """Answer ZeroMQ, which asks who a caller is: the answer is its rank, and goes with all that it sends."""
        version, request, _, _, _, mechanism, *credentials = self._doors.recv_multipart()
        rank = self._rank_of(mechanism, credentials)
        status = (b"400", b"not a rank", b"") if rank is None else (b"200", b"", rank)
        self._doors.send_multipart([version, request, *status, b""])

    def _rank_of(self, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        match mechanism, credentials:
            case b"CURVE", [key]:
                return self._ranks.get(key)
            case b"PLAIN", [rank, secret] if secrets.compare_digest(secret, self._plain.secret):
                return rank if rank in self._ranks.values() else None
        return None

    def close(self, seconds: float = 0.0) -> None:
        """Close both wires. What was given to `send` goes first, if it can within so many seconds."""
        with self._sending:
            self._closed = True
            for wire in (self._control, self._bulk):
                wire.close(round(1000 * seconds))
            self._doors.close()
        self._context.term()
        self._bell.close()
        self._ear.close()


def _chunks(part: memoryview) -> list[memoryview]:
    return [part[at : at + CHUNK] for at in range(0, len(part), CHUNK)]
