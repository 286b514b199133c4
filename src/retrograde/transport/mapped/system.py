"""Three calls of Linux that Python does not offer, and memory by its address."""

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = 202  # its number on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_KEEP_SIZE_AND_PUNCH = 3


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep at this word until somebody wakes those who sleep there, or for so many seconds;
    not at all if the word has another value."""
    whole = int(seconds)
    limit = _Time(whole, int((seconds - whole) * 1e9))
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake whoever sleeps at this word."""
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Give the memory of a part of a file back to the system. The part stays, and reads as zeros."""
    at, size = ctypes.c_long(offset), ctypes.c_long(length)
    if _libc.fallocate(descriptor, _KEEP_SIZE_AND_PUNCH, at, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def address_of(memory: mmap.mmap) -> int:
    """The address at which memory is mapped, as long as somebody refers to it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy_memory(to: int, source: int, nbytes: int) -> None:
    ctypes.memmove(to, source, nbytes)
