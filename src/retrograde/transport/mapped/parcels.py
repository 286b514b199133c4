"""Memory by which a rank hands tensors to others of its host, used again and again.

A parcel is the receiver's from the letter that names it until it sets its flag there. Then its memory is spare, and the
next parcel of about its length gets it: fresh memory costs twenty times as much as the copy into it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from retrograde.transport.mapped.arena import SMALL, Arena, Stretch
from retrograde.transport.mapped.system import copy_memory
from retrograde.transport.messages import SharedPlace

_SPARE = 5  # whose memory is kept for the next ones, for each other rank: one that is late needs more for a moment
_REST = 128  # parcels for each other rank that are made until memory that was not needed for them is given back


class _Out(NamedTuple):
    """A parcel that is its receiver's."""

    stretch: Stretch
    receiver: int


class _Spare(NamedTuple):
    """Memory that no parcel has now."""

    stretch: Stretch
    since: int  # how many parcels had been made by then


class Parcels:
    """The parcels of one arena."""

    def __init__(self, arena: Arena, world: int) -> None:
        self._arena = arena
        self._most = _SPARE * (world - 1)
        self._rest = _REST * (world - 1)
        self._made = 0
        self._out: list[_Out] = []
        self._spare: list[_Spare] = []  # in the order in which they became so

    def make(self, pieces: Sequence[torch.Tensor], receiver: int) -> SharedPlace:
        """Copy these pieces, one after the other, into a parcel, which is the receiver's until that sets its flag.
        Raises OSError where there is no memory."""
        nbytes = sum(piece.nbytes for piece in pieces)
        self.collect()
        stretch = self._take_spare(nbytes) or self._arena.reserve(nbytes)
        self._made += 1
        at = self._arena.flags
        for piece in pieces:
            _copy_in(stretch, at, piece)
            at += piece.nbytes
        stretch.memory[receiver] = 0
        self._out.append(_Out(stretch, receiver))
        return SharedPlace(stretch.offset, nbytes, 0)

    def _take_spare(self, nbytes: int) -> Stretch | None:
        """Take the smallest spare memory that has room for so many bytes and is at most twice as long as they need. Of
        several take the one that became spare last: so what is not needed ages."""
        length = self._arena.length(nbytes)
        fitting = [spare for spare in self._spare if length <= len(spare.stretch.memory) <= 2 * length]
        if not fitting:
            return None
        found = min(reversed(fitting), key=lambda spare: len(spare.stretch.memory))
        self._spare.remove(found)
        return found.stretch

    def take_back(self, place: SharedPlace) -> None:
        """Take back a parcel of which its receiver was not told."""
        parcel = next(each for each in self._out if each.stretch.offset == place.offset)
        self._out.remove(parcel)
        self._spare.append(_Spare(parcel.stretch, self._made))

    def collect(self) -> None:
        """Collect the memory of parcels that have been used. Give back what is too much, or was not needed for long."""
        out = []
        for parcel in self._out:
            if parcel.stretch.memory[parcel.receiver]:  # read once: the receiver may set it at any moment
                self._spare.append(_Spare(parcel.stretch, self._made))
            else:
                out.append(parcel)
        self._out = out
        while len(self._spare) > self._most or (self._spare and self._made - self._spare[0].since > self._rest):
            old = self._spare.pop(0).stretch
            self._arena.give_back(old.offset, len(old.memory))


def _copy_in(stretch: Stretch, at: int, piece: torch.Tensor) -> None:
    nbytes = piece.nbytes
    if nbytes <= SMALL and piece.is_contiguous() and not piece.is_conj() and not piece.is_neg():
        copy_memory(stretch.address + at, piece.data_ptr(), nbytes)
        return
    if not nbytes:
        return
    # Torch may have left a conjugation to be done when it is read.
    plain = piece.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    torch.frombuffer(stretch.memory, dtype=torch.uint8, count=nbytes, offset=at).copy_(plain)
