"""A rank's shared memory: a file without a name, of which stretches are handed out, and another rank's view of it.

A stretch begins with a flag for each rank (one byte), by which other ranks say something to its owner; then come its
data. One that is not used any more is given back to the system, and its place in the file to the next of the same
length: other ranks may still have that place mapped.
"""

import fcntl
import mmap
import os
import platform
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable

import torch

from retrograde.transport.mapped.system import address_of, copy_memory, punch_hole
from retrograde.transport.messages import Share, SharedPlace

_PAGE = mmap.PAGESIZE
_FLAGS = 64  # bytes are a multiple of it, so that data are aligned as torch's allocator does it
_WORD = 8
_GROWTH = 2**26  # bytes by which an arena grows at least
SMALL = 2**18  # bytes up to which a copy is one call; larger ones torch may divide among threads


def supported() -> bool:
    """Can there be an arena here? Files without names are Linux's; what else is needed says Rule 5 of
    [Note: mapped memory]."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _flags_length(world: int) -> int:
    return -(-world // _FLAGS) * _FLAGS


class Stretch:
    """A part of a rank's arena, as this process sees it.

    No named tuple: those have code in no file, which Dynamo would look at where a compiled model reads a page."""

    __slots__ = ("address", "memory", "offset")

    def __init__(self, offset: int, memory: memoryview, address: int) -> None:
        """`memory`: its bytes, with the flags before the data; it lives as long as tensors that lie in it."""
        self.offset = offset
        self.memory = memory
        self.address = address


class Mapping:
    """An arena, mapped into this process as a whole: a mapping takes a descriptor and stretches may be many.

    When the arena has grown it is mapped anew. What lies in the mapping before keeps that one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._whole = mmap.mmap(descriptor, 0)
        self._address = address_of(self._whole)

    def stretch(self, offset: int, length: int) -> Stretch:
        """A stretch of this arena. `length`: in bytes, of its data and the flags before them."""
        end = offset + length
        if end > len(self._whole):
            self._whole = mmap.mmap(self._descriptor, 0)
            self._address = address_of(self._whole)
        if offset % _PAGE or end > len(self._whole):
            raise OSError(f"there is nothing at {offset}, {length} bytes")
        return Stretch(offset, memoryview(self._whole)[offset:end], self._address + offset)


class Arena:
    """This rank's own arena, which other ranks of its host map."""

    def __init__(self, world: int, control: int) -> None:
        """`control`: bytes at the beginning, for letters."""
        self.flags = _flags_length(world)
        self._process = os.getpid()
        self._end = -(-control // _PAGE) * _PAGE  # of what has been handed out
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # places in the file, by length
        self._tensors: dict[int, SharedPlace] = {}  # by the address of their memory
        self.descriptor = os.memfd_create("retrograde", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)  # other users do not get it by /proc either
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._size = self._end
        os.posix_fallocate(self.descriptor, 0, self._end)
        self.control = mmap.mmap(self.descriptor, self._end)
        self._mapping = Mapping(self.descriptor)

    def share(self) -> Share:
        """What others need to map it."""
        file = os.fstat(self.descriptor)
        return Share(self._process, self.descriptor, file.st_dev, file.st_ino)

    # ---- memory that lasts
    def allocate(self, numel: int, dtype: torch.dtype, before_it_goes: Callable[[], None]) -> torch.Tensor:
        """A tensor that has a stretch for itself, as long as it lives. Raises OSError where there is no memory.

        `before_it_goes`: called when nobody refers to it any more, and others still find it."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        stretch = self.reserve(nbytes)
        data = torch.frombuffer(stretch.memory, dtype=dtype, count=numel, offset=self.flags)
        address = data.untyped_storage().data_ptr()
        self._tensors[address] = SharedPlace(stretch.offset, nbytes, 0)
        # The storage refers to the memory, and nobody else does.
        weakref.finalize(stretch.memory, self._forget, address, before_it_goes).atexit = False
        return data

    def place_of(self, tensor: torch.Tensor) -> SharedPlace | None:
        """Where a tensor lies, if it is in this arena and in one piece."""
        found = self._tensors.get(tensor.untyped_storage().data_ptr())
        if found is None or not tensor.is_contiguous():
            return None
        return found._replace(start=int(tensor.storage_offset()) * tensor.element_size())

    def reserve(self, nbytes: int) -> Stretch:
        """A stretch that nobody has, for so many bytes of data. Raises OSError where there is no memory."""
        length = self.length(nbytes)
        offset = self._free[length].pop() if self._free[length] else self._end
        self._grow(offset + length)
        os.posix_fallocate(self.descriptor, offset, length)  # memory for it there is, or an error
        self._end = max(self._end, offset + length)
        return self._mapping.stretch(offset, length)

    def _grow(self, end: int) -> None:
        """Make the file longer, in few steps. What nobody has reserved takes no memory."""
        if end > self._size:
            self._size = max(_GROWTH, 2 * self._size, -(-end // _PAGE) * _PAGE)
            os.ftruncate(self.descriptor, self._size)

    def length(self, nbytes: int) -> int:
        """The bytes of a stretch with so many bytes of data: flags, data, and what fills the last page."""
        return -(-(self.flags + nbytes) // _PAGE) * _PAGE

    def _forget(self, address: int, before_it_goes: Callable[[], None]) -> None:
        place = self._tensors.pop(address)
        if os.getpid() == self._process:  # one that was forked has no memory to give
            before_it_goes()
            self.give_back(place.offset, self.length(place.nbytes))

    def give_back(self, offset: int, length: int) -> None:
        """Give the memory of a stretch back to the system."""
        punch_hole(self.descriptor, offset, length)
        self._free[length].append(offset)


class SharedWord:
    """A number of 64 bits that other ranks look at, and flags by which they say that they wait for it to change.

    Its memory stays as long as the process does: others may look at it whenever they like."""

    def __init__(self, arena: Arena) -> None:
        self._stretch = arena.reserve(_WORD)
        self.place = SharedPlace(self._stretch.offset, _WORD, 0)
        memory = self._stretch.memory
        self._closed = False
        self._flags = memory[: arena.flags]
        self._word = memory[arena.flags : arena.flags + _WORD].cast("q")

    def set(self, value: int) -> None:
        if not self._closed:
            self._word[0] = value

    def close(self, value: int) -> None:
        """Set the value that this word keeps for good."""
        self._closed = True
        self._word[0] = value

    def take_flags(self) -> list[int]:
        """Clear the flags, and return the ranks that have set them: they wait."""
        if not any(self._flags):
            return []
        waiting = [rank for rank, flag in enumerate(self._flags) if flag]
        for rank in waiting:
            self._flags[rank] = 0
        return waiting


class PeerArena:
    """Another rank's arena, mapped into this process."""

    def __init__(self, share: Share, world: int, control: int) -> None:
        """Map the arena. Raises OSError where it cannot be mapped: in another namespace, or as another user."""
        self._flags = _flags_length(world)
        path = f"/proc/{share.process}/fd/{share.descriptor}"
        file = os.stat(path)
        # In another process namespace this is a file of another process: a device, or that one's arena.
        if (file.st_dev, file.st_ino) != (share.device, share.inode):
            raise OSError(f"descriptor {share.descriptor} of process {share.process} is not its arena")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        if not fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"descriptor {share.descriptor} of process {share.process} may be cut off: it is not sealed")
        self.control = mmap.mmap(self._descriptor, control)
        self._mapping = Mapping(self._descriptor)

    def view(self, place: SharedPlace, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that lies at a place of the arena."""
        if place.start + numel * dtype.itemsize > place.nbytes:
            raise OSError(f"{numel} elements of {dtype} do not fit into {place}")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        memory = self._stretch(place).memory
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=self._flags + place.start)

    def unpack(self, place: SharedPlace, numel: int, dtype: torch.dtype, receiver: int) -> torch.Tensor:
        """A parcel as a tensor. Its owner is told when nobody refers to the tensor any more."""
        tensor = self.view(place, numel, dtype)
        weakref.finalize(tensor, _set_flag, self._stretch(place).memory, receiver).atexit = False
        return tensor

    def give_back(self, place: SharedPlace, receiver: int) -> None:
        """Give a parcel back to its owner at once."""
        _set_flag(self._stretch(place).memory, receiver)

    def flags(self, place: SharedPlace) -> memoryview:
        return self._stretch(place).memory[: self._flags]

    def word(self, place: SharedPlace) -> memoryview:
        return self._stretch(place).memory[self._flags : self._flags + _WORD].cast("q")

    def copy_out(self, place: SharedPlace, at: int, tensor: torch.Tensor) -> None:
        """Fill a tensor whose elements lie side by side with what is `at` bytes from the beginning of a parcel."""
        nbytes = tensor.nbytes
        if at + nbytes > place.nbytes:
            raise OSError(f"{nbytes} bytes at {at} are not in {place}")
        if nbytes <= SMALL:
            copy_memory(tensor.data_ptr(), self._stretch(place).address + self._flags + at, nbytes)
        else:
            there = torch.frombuffer(
                self._stretch(place).memory, dtype=torch.uint8, count=nbytes, offset=self._flags + at
            )
            tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).copy_(there)

    def _stretch(self, place: SharedPlace) -> Stretch:
        return self._mapping.stretch(place.offset, self._flags + place.nbytes)


def _set_flag(memory: memoryview, rank: int) -> None:
    memory[rank] = 1
