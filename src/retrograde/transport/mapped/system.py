"""Calls of Linux that Python does not offer."""

import ctypes
import mmap
import os
from functools import cache

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_FUTEX = 202  # its number on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_KEEP_SIZE_AND_PUNCH = 3
_AT_THIS_ADDRESS = 0x10
_WITHOUT_RESERVE = 0x4000
_DISCARD = 4
_ENTRY = 8  # bytes in the table of pages
_KIND = 61  # the highest three bits: whether a page is in memory, swapped, of a file
_OF_A_FILE = 1
_COPY_ALL = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Until somebody wakes those who sleep at this word, which may be never; not at all if it has another value."""
    whole = int(seconds)
    limit = _Time(whole, int((seconds - whole) * 1e9))
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Whoever sleeps at this word."""
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Give the memory of a part of a file back to the system. The part stays, and reads as zeros."""
    at, size = ctypes.c_long(offset), ctypes.c_long(length)
    if _libc.fallocate(descriptor, _KEEP_SIZE_AND_PUNCH, at, size):
        raise _last_error()


def show_file(address: int, length: int, descriptor: int, offset: int) -> None:
    """From now on memory that is this process's shows a part of a file, until it is written to: what is written, a
    memory page at a time, is this process's alone."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | _AT_THIS_ADDRESS | _WITHOUT_RESERVE
    place, size = ctypes.c_void_p(address), ctypes.c_size_t(length)
    if _libc.mmap(place, size, access, kind, descriptor, ctypes.c_long(offset)) != address:
        raise _last_error()


def copy_shown(address: int, length: int) -> None:
    """Of what shows a file, all becomes this process's own, as it is now. Nobody who reads it notices."""
    _advise(address, length, _COPY_ALL)


def show_again(address: int, length: int) -> None:
    """What this process has of its own there is gone; the file shows, and nothing of it counts as this process's."""
    _advise(address, length, _DISCARD)


def is_own_anywhere(address: int, length: int) -> bool:
    """Has this process, of what shows a file there, anything of its own? Also where nobody can tell."""
    count = length // mmap.PAGESIZE
    try:
        read = os.pread(_table_of_pages(), count * _ENTRY, address // mmap.PAGESIZE * _ENTRY)
    except OSError:
        return True
    if len(read) < count * _ENTRY:
        return True
    kinds = (torch.frombuffer(bytearray(read), dtype=torch.int64) >> _KIND) & 7
    return bool(((kinds & _OF_A_FILE == 0) & (kinds != 0)).any())


@cache
def _table_of_pages() -> int:
    """Of this process: a number for each page of its memory."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def _advise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
