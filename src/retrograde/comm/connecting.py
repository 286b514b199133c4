"""How the ranks of a process group reach each other: one connection for each pair.

The group's store brings them together. Each rank says there where it can be called and what a caller must say first,
its secret; every rank calls those of lower rank. Whoever can read the store can call a rank: the secret keeps
strangers out, not somebody who has the store. Nothing that comes from either is executed (messages.py).
"""

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from retrograde.comm.messages import Contact, MessageError, TcpAddress, UnixAddress, decode_contact, encode
from retrograde.errors import DivergenceError

HELLO = struct.Struct("<16sQ")  # the secret of the rank that is called, the rank that calls


def connect(store: Store, rank: int, world: int) -> Iterator[tuple[int, socket.socket]]:
    """A connection to every other rank."""
    secret, patience = secrets.token_bytes(16), store.timeout.total_seconds()  # type: ignore[attr-defined]
    store.set(f"retrograde/host/{rank}", host())
    together = len({store.get(f"retrograde/host/{peer}") for peer in range(world)}) == 1
    with listen(store, together, world) as server:
        server.settimeout(patience)
        store.set(f"retrograde/{rank}", encode(Contact(_address_of(server), secret)))  # type: ignore[arg-type]
        for peer in range(rank):
            contact = _contact(store.get(f"retrograde/{peer}"), rank, peer)
            called = socket.socket(server.family)
            called.settimeout(patience)
            called.connect(_socket_address(contact, server.family, rank, peer))
            called.sendall(HELLO.pack(contact.secret, rank))
            yield peer, called
        missing = world - rank - 1
        while missing:
            caller, _ = server.accept()
            caller.settimeout(patience)
            given, peer = HELLO.unpack(caller.recv(HELLO.size, socket.MSG_WAITALL).ljust(HELLO.size))
            if secrets.compare_digest(given, secret):
                missing -= 1
                yield peer, caller
            else:
                caller.close()


def _contact(data: bytes, rank: int, peer: int) -> Contact:
    try:
        return decode_contact(data)
    except MessageError as error:
        raise _liar(rank, peer, str(error)) from error


def _liar(rank: int, peer: int, why: str) -> DivergenceError:
    return DivergenceError(
        f"rank {rank}: what the process group's store says about rank {peer} (key retrograde/{peer}) is not an address "
        f"of a rank: {why}. Something else writes to that store, or the ranks run different versions of retrograde"
    )


def _address_of(server: socket.socket) -> UnixAddress | TcpAddress:
    name = server.getsockname()
    if server.family == socket.AF_UNIX:
        return UnixAddress(name)
    return TcpAddress(name[0], name[1])


def _socket_address(contact: Contact, family: int, rank: int, peer: int) -> bytes | tuple[str, int]:
    address = contact.address
    if isinstance(address, UnixAddress) != (family == socket.AF_UNIX):
        raise _liar(rank, peer, "it is on another kind of network than this rank's own")
    if isinstance(address, UnixAddress):
        return address.name
    return address.host, address.port


def host() -> str:
    """The same for ranks that reach each other without a network: on one kernel, in one network namespace (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        return secrets.token_hex()


def listen(store: Store, together: bool, world: int) -> socket.socket:
    """Where others call: a name without a file, or the address from which this host reaches the group's store."""
    if together:
        server = socket.socket(socket.AF_UNIX)
        server.bind("")  # the kernel finds a name
        server.listen(world)
        return server
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    where = store.host if isinstance(store, TCPStore) else "localhost"
    family, kind, _, _, address = socket.getaddrinfo(where, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return socket.create_server((probe.getsockname()[0], 0), family=family, backlog=world)
