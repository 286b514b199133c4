"""A rank's shared memory: a file without a name, of which stretches are handed out, and another rank's view of it.

A stretch begins with its data, at the beginning of a memory page, so that they can be mapped elsewhere (mirror.py);
then comes a flag for each rank (one byte), by which other ranks say something to its owner. One that is not used any
more is given back to the system, and its place in the file to the next of the same length: other ranks may still have
that place mapped.
"""

import fcntl
import mmap
import os
import platform
import stat
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from retrograde.transport.mapped.system import punch_hole, show_file
from retrograde.transport.messages import SharedPlace

_PAGE = mmap.PAGESIZE
_SPARE = 4  # parcels that are kept for the next ones: fresh memory costs page faults
_WORD = 8


def supported() -> bool:
    """Files without names are Linux's; what else is needed says Rule 5 of [Note: mapped memory]."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@dataclass(frozen=True, eq=False, slots=True)
class Stretch:
    """A part of this rank's arena."""

    offset: int
    nbytes: int  # of the data
    memory: mmap.mmap


class Arena:
    """This rank's own."""

    def __init__(self, world: int, control: int) -> None:
        """`control`: bytes at the beginning, for letters."""
        self.world = world
        self._process = os.getpid()
        self._end = -(-control // _PAGE) * _PAGE
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # places in the file, by length
        self._tensors: dict[int, SharedPlace] = {}  # by the address of their memory
        self._parcels: list[tuple[Stretch, int]] = []  # that were given out, with their receivers
        self._spare: list[Stretch] = []
        self._gone: list[tuple[SharedPlace, Callable[[], bool]]] = []  # that others may still see, and whether they do
        self.descriptor = os.memfd_create("retrograde", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.posix_fallocate(self.descriptor, 0, self._end)
        self.control = mmap.mmap(self.descriptor, self._end)

    # ---- memory that lasts
    def allocate(self, numel: int, dtype: torch.dtype, leave: Callable[[], Callable[[], bool]]) -> torch.Tensor:
        """A tensor that has a stretch for itself, as long as it lives. Raises OSError where there is no memory.

        `leave`: called when nobody refers to it any more, and others still find it. It returns what says whether others
        still see it: its memory stays until they do not."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        stretch = self.reserve(nbytes)
        data = torch.frombuffer(stretch.memory, dtype=dtype, count=numel)
        address = data.untyped_storage().data_ptr()
        self._tensors[address] = SharedPlace(stretch.offset, nbytes, 0)
        # The storage refers to the memory, and nobody else does.
        weakref.finalize(stretch.memory, self._forget, address, leave).atexit = False
        return data

    def place_of(self, tensor: torch.Tensor) -> SharedPlace | None:
        """Where a tensor lies, if it is here and in one piece."""
        found = self._tensors.get(tensor.untyped_storage().data_ptr())
        if found is None or not tensor.is_contiguous():
            return None
        return found._replace(start=int(tensor.storage_offset()) * tensor.element_size())

    def show_at(self, address: int, place: SharedPlace, nbytes: int) -> None:
        """Let memory of this process show what lies there; who writes to it writes to a copy."""
        show_file(address, nbytes, self.descriptor, place.offset + place.start)

    def reserve(self, nbytes: int) -> Stretch:
        self._collect_gone()
        length = self._length(nbytes)
        offset = self._free[length].pop() if self._free[length] else self._end
        os.posix_fallocate(self.descriptor, offset, length)
        self._end = max(self._end, offset + length)
        return Stretch(offset, nbytes, mmap.mmap(self.descriptor, length, offset=offset))

    def _length(self, nbytes: int) -> int:
        return -(-(nbytes + self.world) // _PAGE) * _PAGE

    def _forget(self, address: int, leave: Callable[[], Callable[[], bool]]) -> None:
        place = self._tensors.pop(address)
        if os.getpid() == self._process:  # one that was forked has no memory to give
            self._gone.append((place, leave()))
            self._collect_gone()

    def _collect_gone(self) -> None:
        """Give back what nobody sees any more. Called by the garbage collector too, also within itself."""
        gone, self._gone = self._gone, []
        for place, is_seen in gone:
            if is_seen():
                self._gone.append((place, is_seen))
            else:
                self._give_back(place.offset, place.nbytes)

    def _give_back(self, offset: int, nbytes: int) -> None:
        length = self._length(nbytes)
        punch_hole(self.descriptor, offset, length)
        self._free[length].append(offset)

    # ---- memory until it has been used
    def parcel(self, pieces: Sequence[torch.Tensor], receiver: int) -> SharedPlace:
        """A copy of these, one after the other, which is the receiver's until it sets its flag."""
        self.collect_parcels()
        nbytes = sum(piece.nbytes for piece in pieces)
        stretch = next((spare for spare in self._spare if spare.nbytes == nbytes), None)
        if stretch is None:
            stretch = self.reserve(nbytes)
        else:
            self._spare.remove(stretch)
        stretch.memory[nbytes + receiver] = 0
        if nbytes:
            numel = sum(piece.numel() for piece in pieces)
            copy = torch.frombuffer(stretch.memory, dtype=pieces[0].dtype, count=numel)
            torch.cat(list(pieces), out=copy)
        self._parcels.append((stretch, receiver))
        return SharedPlace(stretch.offset, nbytes, 0)

    def collect_parcels(self) -> None:
        """Those that have been used: a few are kept, the memory of the others is given back."""
        waiting, used = [], []
        for stretch, receiver in self._parcels:
            if stretch.memory[stretch.nbytes + receiver]:
                used.append(stretch)
            else:
                waiting.append((stretch, receiver))
        self._parcels = waiting
        self._spare += used
        while len(self._spare) > _SPARE:
            old = self._spare.pop(0)
            self._give_back(old.offset, old.nbytes)


class SharedWord:
    """A number of 64 bits that other ranks look at, and flags by which they say that they wait for it to change.

    Its memory stays as long as the process does: others may look at it whenever they like."""

    def __init__(self, arena: Arena) -> None:
        self._stretch = arena.reserve(_WORD)
        self.place = SharedPlace(self._stretch.offset, _WORD, 0)
        memory = memoryview(self._stretch.memory)
        self._closed = False
        self._word = memory[:_WORD].cast("q")
        self._flags = memory[_WORD : _WORD + arena.world]

    def set(self, value: int) -> None:
        if not self._closed:
            self._word[0] = value

    def close(self, value: int) -> None:
        """This is its last one."""
        self._closed = True
        self._word[0] = value

    def take_flags(self) -> list[int]:
        """Ranks that wait; their flags are cleared."""
        if not any(self._flags):
            return []
        waiting = [rank for rank, flag in enumerate(self._flags) if flag]
        for rank in waiting:
            self._flags[rank] = 0
        return waiting


class SharedFlags:
    """A flag for each other rank, which it sets and clears as it likes."""

    def __init__(self, arena: Arena) -> None:
        self._stretch = arena.reserve(0)
        self.place = SharedPlace(self._stretch.offset, 0, 0)
        self._flags = memoryview(self._stretch.memory)[: arena.world]

    def set_by(self) -> list[int]:
        """Ranks that have set theirs."""
        return [rank for rank, flag in enumerate(self._flags) if flag]

    def are_set(self) -> bool:
        return any(self._flags)


class PeerArena:
    """Another rank's."""

    def __init__(self, process: int, descriptor: int, world: int, control: int) -> None:
        """Raises OSError where it cannot be mapped: in another namespace, or as another user."""
        self._world = world
        self._descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        sealed = fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise OSError(f"descriptor {descriptor} of process {process} is not an arena")
        self.control = mmap.mmap(self._descriptor, control)
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}

    def view(self, place: SharedPlace, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that lies there."""
        if place.start + numel * dtype.itemsize > place.nbytes:
            raise OSError(f"{numel} elements of {dtype} do not fit into {place}")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        memory = self._stretch(place)
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=place.start)

    def unpack(self, place: SharedPlace, numel: int, dtype: torch.dtype, receiver: int) -> torch.Tensor:
        """A parcel. Its owner is told when nobody refers to it any more."""
        tensor = self.view(place, numel, dtype)
        weakref.finalize(tensor, _set_flag, self.flags(place), receiver).atexit = False
        return tensor

    def flags(self, place: SharedPlace) -> memoryview:
        return memoryview(self._stretch(place))[place.nbytes : place.nbytes + self._world]

    def word(self, place: SharedPlace) -> memoryview:
        return memoryview(self._stretch(place))[:_WORD].cast("q")

    def show_at(self, address: int, place: SharedPlace, nbytes: int) -> None:
        """Let memory of this process show what lies there. Raises OSError where that cannot be."""
        self._check(place)
        if place.start % _PAGE or nbytes % _PAGE or place.start + nbytes > place.nbytes:
            raise OSError(f"{nbytes} bytes of {place} are not whole memory pages")
        show_file(address, nbytes, self._descriptor, place.offset + place.start)

    def _stretch(self, place: SharedPlace) -> mmap.mmap:
        at = (place.offset, place.nbytes)
        if at not in self._mapped:
            self._check(place)
            self._mapped[at] = mmap.mmap(self._descriptor, place.nbytes + self._world, offset=place.offset)
        return self._mapped[at]

    def _check(self, place: SharedPlace) -> None:
        end = place.offset + place.nbytes + self._world
        if place.offset % _PAGE or end > os.fstat(self._descriptor).st_size:
            raise OSError(f"there is nothing at {place}")


def _set_flag(flags: memoryview, rank: int) -> None:
    flags[rank] = 1
