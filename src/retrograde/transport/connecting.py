"""How the ranks of a process group reach each other: one connection for each pair.

The group's store brings them together. Each rank says there where it can be called and what a caller must say first,
its secret; every rank calls those of lower rank. Whoever can read the store can call a rank: the secret keeps
strangers out, not somebody who has the store. Nothing that comes from either is executed (messages.py).

Everything here has one deadline. When it has passed, the error names the ranks that did not come. A rank that gives up
says why in the store, so that the others need not wait for their own deadline and name the same cause.
"""

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from retrograde.errors import DivergenceError
from retrograde.torch_internals import PrefixStore, Store, TCPStore
from retrograde.transport.messages import (
    Contact,
    MessageError,
    TcpAddress,
    UnixAddress,
    decode_contact,
    decode_texts,
    encode,
)

HELLO = struct.Struct("<16sQ")  # the secret of the rank that is called, the rank that calls
_STRANGERS = 64  # callers that may wait beside the ranks: the oldest goes first
_PAUSE = 0.01  # seconds between two looks
_GAVE_UP = "retrograde/gave up"  # the key under which the rank that gave up last says why


def connect(store: Store, rank: int, world: int, timeout: float) -> list[tuple[int, socket.socket]]:
    """A connection to every other rank, or an error after `timeout` seconds."""
    return _Connecting(store, rank, world, timeout).connect()


class _Connecting:
    """One rank's way to all others."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._secret = secrets.token_bytes(16)
        self._found: dict[int, socket.socket] = {}
        self._old_note = b""  # why somebody gave up at an earlier attempt

    def connect(self) -> list[tuple[int, socket.socket]]:
        try:
            self._find_all()
        except BaseException as error:
            for sock in self._found.values():
                sock.close()
            if isinstance(error, RuntimeError) and not isinstance(error, DivergenceError):
                raise DivergenceError(
                    f"rank {self._rank}: the process group's store does not answer, so the process that holds it (that "
                    f"of rank 0, as a rule) has ended; its own output says why"
                ) from error
            with contextlib.suppress(RuntimeError):  # if the store ends now, this error is still the one to tell
                self._take_back()
                note = [secrets.token_hex(8), str(error)]  # no two are alike
                self._store.set(_GAVE_UP, encode(note))  # type: ignore[arg-type]
            raise
        # Everybody has read them. A group that is made later under the same name must not find an old address.
        self._take_back()
        return list(self._found.items())

    def _take_back(self) -> None:
        self._store.set(f"retrograde/host/{self._rank}", "")
        self._store.set(f"retrograde/{self._rank}", "")

    def _find_all(self) -> None:
        self._old_note = self._look_up(_GAVE_UP)
        self._store.set(f"retrograde/host/{self._rank}", host())
        hosts = self._read({peer: f"retrograde/host/{peer}" for peer in range(self._world)})
        together = len(set(hosts.values())) == 1
        with listen(self._store, together, self._world + _STRANGERS) as server:
            contact = encode(Contact(_address_of(server), self._secret))
            self._store.set(f"retrograde/{self._rank}", contact)  # type: ignore[arg-type]
            contacts = self._read({peer: f"retrograde/{peer}" for peer in range(self._rank)})
            for peer, data in contacts.items():
                self._call(peer, _contact(data, self._rank, peer), server.family)
            self._answer(server, {*range(self._rank + 1, self._world)})

    def _read(self, keys: dict[int, str]) -> dict[int, bytes]:
        """What ranks have said in the store. (What is empty was taken back.)"""
        said: dict[int, bytes] = {}
        for rank, key in keys.items():
            while not (data := self._look_up(key)):
                if time.monotonic() >= self._deadline:
                    raise self._nobody_came(peer for peer, other in keys.items() if not self._look_up(other))
                self._check_that_nobody_gave_up()
                time.sleep(_PAUSE)
            said[rank] = data
        return said

    def _look_up(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _check_that_nobody_gave_up(self) -> None:
        note = self._look_up(_GAVE_UP)
        if note == self._old_note:
            return
        try:
            _, why = decode_texts(note)
        except ValueError:
            why = "what it says in the store cannot be read"
        raise DivergenceError(f"rank {self._rank}: another rank gave up while the ranks were connecting: {why}")

    def _nobody_came(self, missing: Iterable[int]) -> DivergenceError:
        return DivergenceError(
            f"rank {self._rank} waited {self._timeout:g} s for rank(s) {', '.join(map(str, missing))} to connect, "
            f"which did not come: each has not called shard() or Pipeline() on this process group, or has ended (its "
            f"own output says why). Let every rank of the group call it, or raise shard(timeout=...)"
        )

    def _call(self, peer: int, contact: Contact, family: int) -> None:
        address = _socket_address(contact, family, self._rank, peer)
        sock = self._found[peer] = socket.socket(family)
        while True:
            sock.settimeout(max(self._deadline - time.monotonic(), _PAUSE))
            try:
                sock.connect(address)
                sock.sendall(HELLO.pack(contact.secret, self._rank))
                return
            except BlockingIOError as error:  # its queue of callers is full
                if time.monotonic() >= self._deadline:
                    raise self._nobody_came([peer]) from error
                time.sleep(_PAUSE)
            except TimeoutError as error:
                raise self._nobody_came([peer]) from error
            except OSError as error:
                raise DivergenceError(
                    f"rank {self._rank}: rank {peer} has ended while the ranks were connecting, or cannot be reached: "
                    f"{error} ({address!r}); its own output says why"
                ) from error

    def _answer(self, server: socket.socket, expected: Collection[int]) -> None:
        """Take the calls of the ranks that are expected. Who says nothing, or the wrong thing, holds nobody up."""
        heard: dict[socket.socket, bytes] = {}  # of callers that have not said all yet, oldest first
        server.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            try:
                while missing := [peer for peer in expected if peer not in self._found]:
                    ready = selector.select(20 * _PAUSE)
                    if not ready:
                        self._check_that_nobody_gave_up()
                    if not ready and time.monotonic() >= self._deadline:
                        raise self._nobody_came(missing)
                    for key, _ in ready:
                        if key.fileobj is server:
                            caller, _ = server.accept()
                            caller.setblocking(False)
                            selector.register(caller, selectors.EVENT_READ)
                            heard[caller] = b""
                        else:
                            self._listen_to(key.fileobj, heard, selector, missing)  # type: ignore[arg-type]
                    while len(heard) > self._world + _STRANGERS:
                        self._hang_up(next(iter(heard)), heard, selector)
            finally:
                for caller in heard:
                    caller.close()

    def _listen_to(
        self,
        caller: socket.socket,
        heard: dict[socket.socket, bytes],
        selector: selectors.BaseSelector,
        missing: Collection[int],
    ) -> None:
        if caller not in heard:
            return  # it was hung up on
        try:
            more = caller.recv(HELLO.size - len(heard[caller]))
        except OSError:
            more = b""
        heard[caller] += more
        if not more:
            self._hang_up(caller, heard, selector)
        elif len(heard[caller]) == HELLO.size:
            secret, peer = HELLO.unpack(heard[caller])
            if secrets.compare_digest(secret, self._secret) and peer in missing and peer not in self._found:
                self._found[peer] = caller
                selector.unregister(caller)
                del heard[caller]
            else:
                self._hang_up(caller, heard, selector)

    def _hang_up(
        self, caller: socket.socket, heard: dict[socket.socket, bytes], selector: selectors.BaseSelector
    ) -> None:
        selector.unregister(caller)
        del heard[caller]
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


def listen(store: Store, together: bool, callers: int) -> socket.socket:
    """Where others call: a name without a file, or the address from which this host reaches the group's store."""
    if together:
        server = socket.socket(socket.AF_UNIX)
        server.bind("")  # the kernel finds a name
        server.listen(callers)
        return server
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    where = store.host if isinstance(store, TCPStore) else "localhost"
    family, kind, _, _, address = socket.getaddrinfo(where, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return socket.create_server((probe.getsockname()[0], 0), family=family, backlog=callers)
