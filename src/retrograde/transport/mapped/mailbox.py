"""Letters between main threads: in each rank's arena, a box for every other rank.

A box is a ring of bytes with one writer and one reader. Two counters say how many bytes were written and taken since
the beginning; each is changed by one side alone.

    written  ──────────────┐
    ... │ taken │ letter │ letter │ free ...          letter: its length (8 bytes), its bytes, rounded up to 8
                └─ taken

Who waits for a letter sleeps at the bell, a word that every writer changes and then wakes who sleeps there. Writers
give it values that no other writer gives it, so that a change is never mistaken for none.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence

from retrograde.transport.mapped.system import sleep_while, wake

_WORD = 8
_LINE = 64  # bytes of a cache line
_HEAD = 64  # bytes before the first box: the bell, and whether the rank has finished
_FINISHED = 8  # where that is
_COUNTERS = 128  # bytes before a box: each counter has a cache line of its own
_TAKEN = 64  # where the second counter is
_ALL_BOXES = 2**20  # bytes, shared by all ranks
_SMALLEST, _LARGEST = 2**14, 2**17


def box_length(world: int) -> int:
    """Whole cache lines, so that counters are aligned: only then is one stored at once."""
    return min(max(_ALL_BOXES // world, _SMALLEST), _LARGEST) // _LINE * _LINE


def control_length(world: int) -> int:
    """Bytes of a rank's arena for bell and boxes."""
    return _HEAD + world * (_COUNTERS + box_length(world))


class _Box:
    def __init__(self, memory: mmap.mmap, writer: int, world: int) -> None:
        self.length = box_length(world)
        start = _HEAD + writer * (_COUNTERS + self.length)
        counters = memoryview(memory)[start : start + _COUNTERS].cast("Q")
        self._written, self._taken = counters[:1], counters[_TAKEN // _WORD :]
        self._ring = memoryview(memory)[start + _COUNTERS : start + _COUNTERS + self.length]

    def put(self, parts: Sequence[memoryview]) -> bool:
        """Write a letter into the box. Returns whether there was room."""
        length = sum(map(len, parts))
        written = self._written[0]
        if written + _WORD + length - self._taken[0] > self.length - _WORD:
            return False
        at = self._copy_in(written, memoryview(length.to_bytes(_WORD, "little")))
        for part in parts:
            at = self._copy_in(at, part)
        self._written[0] = _rounded(at)  # what comes after this is seen after what comes before it
        return True

    def take(self) -> bytearray | None:
        taken = self._taken[0]
        if taken == self._written[0]:
            return None
        length = int.from_bytes(self._copy_out(taken, _WORD), "little")
        if length > self.length:
            raise ValueError(f"a letter of {length} bytes in a box of {self.length}")
        letter = self._copy_out(taken + _WORD, length)
        self._taken[0] = _rounded(taken + _WORD + length)
        return letter

    def _copy_in(self, at: int, part: memoryview) -> int:
        start = at % self.length
        first = min(len(part), self.length - start)
        self._ring[start : start + first] = part[:first]
        self._ring[: len(part) - first] = part[first:]
        return at + len(part)

    def _copy_out(self, at: int, length: int) -> bytearray:
        start = at % self.length
        first = min(length, self.length - start)
        return bytearray(self._ring[start : start + first]) + self._ring[: length - first]


def _rounded(at: int) -> int:
    return -(-at // _WORD) * _WORD


class _Bell:
    """A word in shared memory, which changes whenever it rings, and at which threads of its rank sleep."""

    def __init__(self, memory: mmap.mmap, ringer: int, world: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory)
        self._address = ctypes.addressof(self._word)
        self._next = ringer
        self._world = world

    @property
    def value(self) -> int:
        return self._word.value

    def ring(self) -> None:
        self._next = (self._next + self._world) % (2**32 // self._world * self._world)
        self._word.value = self._next
        wake(self._address)

    def sleep(self, heard: int, seconds: float) -> None:
        """Sleep until the bell rings after it was `heard`, or for so many seconds."""
        sleep_while(self._address, heard, seconds)


class Mailbox:
    """This rank's boxes, in its own arena."""

    def __init__(self, memory: mmap.mmap, rank: int, world: int) -> None:
        self._boxes = {peer: _Box(memory, peer, world) for peer in range(world) if peer != rank}
        self._bell = _Bell(memory, rank, world)
        self._memory = memory
        self._lock = threading.Lock()  # several threads of this rank may ring
        self._looked_at: int | None = None  # what the bell was when boxes were last looked at

    @property
    def heard(self) -> int:
        return self._bell.value

    def sleep(self, heard: int, seconds: float) -> None:
        self._bell.sleep(heard, seconds)

    def ring(self) -> None:
        """Wake threads of this rank that sleep."""
        with self._lock:
            self._bell.ring()

    def finish(self) -> None:
        """Note, for other ranks to see, that this one has finished: it reads no more letters in time, and waits only
        for as long as others ask for something."""
        self._memory[_FINISHED] = 1

    def letters(self) -> Iterator[tuple[int, Iterator[bytearray]]]:
        """The letters that have come, by sender. To take one raises ValueError where something else is in the box.
        One thread at a time may call this.

        Whoever leaves a letter rings after that. While the bell is what it was, nothing has been rung for."""
        heard = self.heard
        if heard == self._looked_at:
            return
        for peer, box in self._boxes.items():
            yield peer, iter(box.take, None)
        self._looked_at = heard


class Outbox:
    """This rank's box in another rank's arena."""

    def __init__(self, memory: mmap.mmap, rank: int, world: int) -> None:
        self._box = _Box(memory, rank, world)
        self._bell = _Bell(memory, rank, world)
        self._memory = memory
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Has the other rank finished?"""
        return self._memory[_FINISHED] != 0

    def post(self, parts: Sequence[memoryview]) -> bool:
        """Leave a letter. Returns whether there was room for it. Nobody waits for room."""
        with self._lock:
            if not self._box.put(parts):
                return False
            self._bell.ring()
            return True

    def ring(self) -> None:
        with self._lock:
            self._bell.ring()
