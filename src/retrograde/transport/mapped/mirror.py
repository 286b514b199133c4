"""A page in which shards of other ranks show where they lie, so that a gather moves nothing.

[Note: mirrors]

    rank 0's arena   [ shard 0 ]───────┐                        mapped by its owner to write, by all others to look at
    rank 1's arena   [ shard 1 ]───────│────────┐
                                       v        v
    rank 0's page                 [ shard 0 | shard 1 ]         shows them; a memory page that rank 0 writes to becomes
                                                                its own

A page is a range of addresses. Where a shard shows, the range is a private mapping of its owner's file: what the owner
writes is seen at once, and what this rank writes is seen by nobody else. So no write to a page, of whatever kind,
reaches another rank's shard; and a page that shows shards is right only while nobody changes them:

Rule 1: a shard shows only while its owner is at rest, at this rank's clock, and this rank has set its flag beside the
        owner's state before it looked at that. So it is said to the owner, or the owner is not at rest any more.
Rule 2: an owner that has left rest writes when all flags are clear (`Transport.reclaim`). At a fence everybody lets go
        by itself (pages/pager.py): pages that nobody needs are dropped, all others become this rank's own, as they
        are. Those who do not, since they know of no fence (`p.local`), are told to; their service thread does it.
Rule 3: what becomes this rank's own is copied by the system, memory page by memory page. Who reads it meanwhile reads
        the same values.
Rule 4: the memory of a shard whose owner has let go of the model stays until all flags are clear (arena.py).
Rule 5: before this process is forked all pages become its own: flags are this process's, and the other one would see
        what is written when they are clear.
"""

import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from retrograde.transport.mapped.system import copy_shown, is_own_anywhere, show_again, show_file
from retrograde.transport.messages import SharedPlace, Stamp
from retrograde.transport.protocol import Work

_PAGE = mmap.PAGESIZE
_OF_ITS_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # nothing is reserved for it


class ShownArena(Protocol):
    """Whose memory can be made to show here."""

    def show_at(self, address: int, place: SharedPlace, nbytes: int) -> None: ...


class Sights:
    """Whose shards show in pages of this rank, of one engine: owners find a flag set for as long as they do."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the last one taken: the garbage collector comes here, whatever locks it finds
        self._barrier = threading.Lock()
        self._process = os.getpid()
        self._pages: defaultdict[int, set[object]] = defaultdict(set)  # by owner
        self._flags: dict[int, memoryview] = {}  # this rank's, by owner

    def begin(self, owner: int, page: object, flag: memoryview) -> None:
        """A page is about to show an owner's shard. What is looked at next is looked at after that."""
        with self.lock:
            self._flags[owner] = flag
            self._pages[owner].add(page)
            flag[0] = 1
            with self._barrier:  # taking a lock that is free is a barrier; one that this thread has is none
                pass

    def end(self, owner: int, page: object) -> bool:
        """Says whether the owner's shards show nowhere any more."""
        with self.lock:
            pages = self._pages[owner]
            if page not in pages or os.getpid() != self._process:  # one that was forked has set no flag
                return False
            pages.remove(page)
            if not pages:
                self._flags[owner][0] = 0
            return not pages

    def end_all(self, page: object) -> None:
        """By the garbage collector. Nobody is woken: an owner that waits looks again."""
        for owner in list(self._pages):
            self.end(owner, page)


@dataclass(frozen=True, eq=False)
class Sighting:
    """What is known of an owner's shard of a unit: where it lies, and how its owner is told that it shows here."""

    arena: ShownArena
    place: SharedPlace
    flag: memoryview | None  # None: it is this rank's own, which knows


class MirrorHost(Protocol):
    """The transport, as a mirror sees it."""

    rank: int
    sights: Sights

    def sighting(self, unit: int, owner: int) -> Sighting | None: ...

    def is_at_rest(self, unit: int, owner: int, stamp: Stamp) -> bool: ...

    def wake(self, owner: int) -> None:
        """It may wait for its shards to show nowhere."""

    def read_into(self, mirror: "ArenaMirror", name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        """Start showing these owners' shards, each as soon as it is at rest, or reading them into their memory."""


_all: "weakref.WeakSet[ArenaMirror]" = weakref.WeakSet()


def _keep_all() -> None:
    """A process that is forked has its parent's pages as they are now (Rule 5)."""
    for mirror in list(_all):
        mirror.keep()


os.register_at_fork(before=_keep_all)


class ArenaMirror:
    """Implements `Mirror`. What of a page does not show a shard is this rank's own memory."""

    def __init__(
        self,
        host: MirrorHost,
        unit: int,
        spans: Mapping[int, slice],
        shard: torch.Tensor,
        own: Sighting,
        returns: bool,
    ) -> None:
        """`spans`: of the page, by owner; they are whole memory pages. `shard`: this rank's, in its arena, where it is
        found by `own`. `returns`: the page is there again after each step."""
        self.unit = unit
        self.shard = shard
        self._host = host
        self._own = own
        self._returns = returns
        self._sights = host.sights
        self._spans = dict(spans)
        self._itemsize = shard.element_size()
        self._length = int(max(span.stop for span in spans.values())) * self._itemsize
        memory = mmap.mmap(-1, self._length, flags=_OF_ITS_OWN)
        self.page = torch.frombuffer(memory, dtype=shard.dtype)
        self._address = self.page.data_ptr()
        self._shown: set[int] = set()  # owners whose shards show
        self._came: set[int] = set()  # owners whose shards the last read did not copy
        self._mapped: dict[int, SharedPlace] = {}  # what each span can show
        self._written: set[int] = set()  # owners in whose spans there is memory of this rank's own, as far as is known
        self._blank: set[int] = set()  # owners in whose spans there is none, and nothing has been looked at
        self._key = object()  # to the sights, for as long as the memory is there
        weakref.finalize(memory, self._sights.end_all, self._key).atexit = False
        _all.add(self)

    # ---- questions
    @property
    def shows(self) -> bool:
        """Does any shard show?"""
        return bool(self._shown)

    @property
    def moved(self) -> int:
        """How many bytes the last read has copied from other ranks."""
        copied = self._spans.keys() - self._came - {self._host.rank}
        return sum(map(self._nbytes, copied))

    @property
    def own_bytes(self) -> int:
        """How many bytes of the page are this rank's own memory."""
        return self._length - sum(map(self._nbytes, self._shown))

    def _nbytes(self, owner: int) -> int:
        span = self._spans[owner]
        return int(span.stop - span.start) * self._itemsize

    def _at(self, owner: int) -> int:
        return self._address + int(self._spans[owner].start) * self._itemsize

    # ---- showing
    def read(self, name: str, stamp: Stamp) -> Work:
        self._came = set()
        rank = self._host.rank
        if not self.show(rank, stamp):
            self._note_written(rank)
            self.page[self._spans[rank]].copy_(self.shard)
        into = {owner: self.page[span] for owner, span in self._spans.items() if owner != rank}
        return self._host.read_into(self, name, stamp, into)

    def show(self, owner: int, stamp: Stamp) -> bool:
        """Let an owner's shard show, if it is at rest; says whether it does."""
        found = self._own if owner == self._host.rank else self._host.sighting(self.unit, owner)
        if found is None:
            return False
        if found.flag is None:
            return self._show_own(found, stamp)
        with self._sights.lock:  # so that it shows, or is known not to, when the owner says that it must not
            self._sights.begin(owner, self._key, found.flag)
            is_at_rest = self._host.is_at_rest(self.unit, owner, stamp)
            if is_at_rest:
                self._let_show(owner, found)
            else:
                self._let_go(owner)
        return is_at_rest

    def _show_own(self, found: Sighting, stamp: Stamp) -> bool:
        is_at_rest = self._host.is_at_rest(self.unit, self._host.rank, stamp)  # which takes a lock
        with self._sights.lock:
            if is_at_rest:
                self._let_show(self._host.rank, found)
            else:
                self._let_go(self._host.rank)
        return is_at_rest

    def _let_show(self, owner: int, found: Sighting) -> None:
        at, nbytes = self._at(owner), self._nbytes(owner)
        if self._mapped.get(owner) != found.place:
            found.arena.show_at(at, found.place, nbytes)
            self._mapped[owner] = found.place
        elif owner not in self._blank and (owner in self._written or is_own_anywhere(at, nbytes)):
            show_again(at, nbytes)
        self._written.discard(owner)
        self._blank.discard(owner)
        self._shown.add(owner)
        self._came.add(owner)

    def will_copy(self, owner: int) -> None:
        """Something is about to be written where this owner's shard showed."""
        with self._sights.lock:
            self._note_written(owner)
            self._let_go(owner)

    def _note_written(self, owner: int) -> None:
        self._written.add(owner)
        self._blank.discard(owner)

    # ---- letting go
    def keep(self) -> None:
        """What shows becomes this rank's own memory, as it is."""
        for owner in list(self._shown):
            self.keep_of(owner)

    def keep_of(self, owner: int) -> None:
        """By any thread."""
        with self._sights.lock:
            if owner not in self._shown:
                return
            copy_shown(self._at(owner), self._nbytes(owner))
            self._note_written(owner)
            unseen = self._let_go(owner)
        if unseen:
            self._host.wake(owner)

    def forget(self) -> None:
        """Nobody looks at the page: it has no memory of its own until it is read again. Where it returns soon, the
        system's tables are left as they are: they would be made anew, memory page by memory page."""
        with self._sights.lock:
            for owner in list(self._written if self._returns else self._spans):
                show_again(self._at(owner), self._nbytes(owner))
                self._blank.add(owner)
            self._written.clear()
            unseen = [owner for owner in list(self._shown) if self._let_go(owner)]
        for owner in unseen:
            self._host.wake(owner)

    def _let_go(self, owner: int) -> bool:
        self._shown.discard(owner)
        return self._sights.end(owner, self._key)


@cache
def can_mirror() -> bool:
    """Does this system let memory show a file, change with it, be written to alone, become this process's, and show
    the file again?"""
    try:
        return _mirrors()
    except OSError:
        return False


def _mirrors() -> bool:
    descriptor = os.memfd_create("retrograde-probe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, 2 * _PAGE)
        owners = torch.frombuffer(mmap.mmap(descriptor, 2 * _PAGE), dtype=torch.uint8)[::_PAGE]
        page = torch.frombuffer(mmap.mmap(-1, 2 * _PAGE, flags=_OF_ITS_OWN), dtype=torch.uint8)[::_PAGE]
        address = page.data_ptr()
        show_file(address, 2 * _PAGE, descriptor, 0)
        seen = [page.tolist()]
        owners.fill_(1)
        seen.append(page.tolist())
        page[0] = 7
        owners.fill_(2)
        seen.append(page.tolist())
        copy_shown(address, 2 * _PAGE)
        owners.fill_(3)
        seen.append(page.tolist())
        own = is_own_anywhere(address, 2 * _PAGE)
        show_again(address, 2 * _PAGE)
        seen.append(page.tolist())
        return seen == [[0, 0], [1, 1], [7, 2], [7, 2], [3, 3]] and owners.tolist() == [3, 3] and own
    finally:
        os.close(descriptor)
