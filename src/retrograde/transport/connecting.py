"""How the ranks of a process group find each other.

The group's store brings them together. Each rank says there where it can be reached and by which key it will be known
(wires.py), and reads what all others say. Connections are made later, each when it is first needed. Whoever can write
to the store while the ranks find each other can take a rank's place: the store is what they trust. Nothing that comes
from it is executed (messages.py), and what has been read by all is taken out of it.

Everything here has one deadline. When it has passed, the error names the ranks that did not come. A rank that gives up
says why in the store, so that the others need not wait for their own deadline and name the same cause.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from retrograde.errors import DivergenceError
from retrograde.torch_internals import PrefixStore, Store, TCPStore
from retrograde.transport.messages import Contact, MessageError, UnixAddress, decode_contact, decode_texts, encode
from retrograde.transport.wires import Wires

_PAUSE = 0.01  # seconds between two looks
_GAVE_UP = "retrograde/gave up"  # the key under which the rank that gave up last says why


def connect(store: Store, rank: int, world: int, timeout: float) -> Wires:
    """This rank's wires, by which it reaches every other rank; or an error after `timeout` seconds."""
    return _Connecting(store, rank, world, timeout).connect()


class _Connecting:
    """One rank's way to all others."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._old_note = b""  # why somebody gave up at an earlier attempt

    def connect(self) -> Wires:
        try:
            return self._find_all()
        except BaseException as error:
            if isinstance(error, RuntimeError) and not isinstance(error, DivergenceError):
                raise DivergenceError(
                    f"rank {self._rank}: the process group's store does not answer, so the process that holds it (that "
                    f"of rank 0, as a rule) has ended; its own output says why"
                ) from error
            with contextlib.suppress(RuntimeError):  # if the store ends now, this error is still the one to tell
                self._take_back([self._rank])
                note = [secrets.token_hex(8), str(error)]  # no two are alike
                self._store.set(_GAVE_UP, encode(note))  # type: ignore[arg-type]
            raise

    def _find_all(self) -> Wires:
        self._old_note = self._look_up(_GAVE_UP)
        self._store.set(_host_key(self._rank), host())
        hosts = self._read({peer: _host_key(peer) for peer in range(self._world)})
        together = len(set(hosts.values())) == 1
        wires = Wires(self._rank, None if together else own_address(self._store))
        try:
            self._store.set(_key(self._rank), encode(wires.contact))  # type: ignore[arg-type]
            said = self._read({peer: _key(peer) for peer in range(self._world)})
            others = {peer: data for peer, data in said.items() if peer != self._rank}
            wires.admit({peer: self._contact(peer, data, together) for peer, data in others.items()})
            self._forget_when_all_have_read(said)
        except BaseException:
            wires.close()
            raise
        return wires

    def _read(self, keys: dict[int, str]) -> dict[int, bytes]:
        """Wait for what these ranks say in the store. (What is empty was taken back.)"""
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

    def _contact(self, peer: int, data: bytes, together: bool) -> Contact:
        try:
            found = decode_contact(data)
            if {isinstance(address, UnixAddress) for address in (found.control, found.bulk)} != {together}:
                raise MessageError("it is on another kind of network than this rank's own")
        except MessageError as error:
            raise DivergenceError(
                f"rank {self._rank}: what the process group's store says about rank {peer} (key {_key(peer)}) is not "
                f"an address of a rank: {error}. Something else writes to that store, or the ranks run different "
                f"versions of retrograde"
            ) from error
        return found

    def _forget_when_all_have_read(self, said: Mapping[int, bytes]) -> None:
        """Take all addresses out of the store, if this rank is the last to have read them: a group that is made later
        under the same name must not find old ones."""
        same = hashlib.sha256(b"".join(said[peer] for peer in range(self._world))).hexdigest()
        if self._store.add(f"retrograde/read/{same}", 1) == self._world:
            self._take_back(range(self._world))

    def _take_back(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._store.set(_host_key(rank), "")
            self._store.set(_key(rank), "")


def _key(rank: int) -> str:
    return f"retrograde/{rank}"


def _host_key(rank: int) -> str:
    return f"retrograde/host/{rank}"


def host() -> str:
    """A text that is the same for ranks that reach each other without a network:
    on one kernel, in one network namespace (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        return secrets.token_hex()


def own_address(store: Store) -> str:
    """The address from which this host reaches the group's store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    where = store.host if isinstance(store, TCPStore) else "localhost"
    family, kind, _, _, address = socket.getaddrinfo(where, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        name: str = probe.getsockname()[0]
        return name
