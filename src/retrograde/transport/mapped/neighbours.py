"""The ranks of this host: their arenas, as far as they could be mapped, and this rank's own."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from retrograde.transport.mapped.arena import Arena, PeerArena, supported
from retrograde.transport.mapped.mailbox import Mailbox, Outbox, control_length
from retrograde.transport.mapped.parcels import Parcels
from retrograde.transport.messages import Share, SharedPlace

logger = logging.getLogger("retrograde")


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another rank whose arena this one has mapped."""

    arena: PeerArena
    outbox: Outbox


class Neighbours:
    """This rank's arena, and those of other ranks of its host as far as they can be mapped:
    that is found by trying (connections.py)."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self.arena = Arena(world, control_length(world))
        self.parcels = Parcels(self.arena, world)
        self.mailbox = Mailbox(self.arena.control, rank, world)
        self.found: dict[int, Neighbour] = {}
        self.found_by: set[int] = set()  # those that have mapped this rank's arena
        self._told = False

    def find(self, peer: int, share: Share) -> bool:
        """Map another rank's arena. Returns whether that was possible."""
        try:
            arena = PeerArena(share, self._world, control_length(self._world))
        except OSError as error:
            self._say(f"rank {self._rank} cannot map the memory of rank {peer}: {error}")
            return False
        self.found[peer] = Neighbour(arena, Outbox(arena.control, self._rank, self._world))
        return True

    def allocate(self, numel: int, dtype: torch.dtype, before_it_goes: Callable[[], None]) -> torch.Tensor:
        """Make a tensor in the arena, or outside of it where there is no more memory for it."""
        try:
            return self.arena.allocate(numel, dtype, before_it_goes)
        except OSError as error:
            self._say(f"rank {self._rank}: no shared memory for {numel * dtype.itemsize} bytes: {error}")
            return torch.empty(numel, dtype=dtype, device="cpu")

    def parcel(self, pieces: Sequence[torch.Tensor], receiver: int) -> SharedPlace | None:
        """Copy these pieces into the arena for another rank; None if that cannot map it, or there is no room."""
        if receiver not in self.found_by:
            return None
        try:
            return self.parcels.make(pieces, receiver)
        except OSError as error:
            self._say(f"rank {self._rank}: no shared memory for a gradient: {error}")
            return None

    def _say(self, text: str) -> None:
        """Warn once: the rest would be more of the same."""
        if not self._told:
            self._told = True
            logger.warning("%s; bytes go over connections instead, which is slower", text)


def neighbours_of(rank: int, world: int) -> Neighbours | None:
    """The neighbours of a rank whose ranks are all on this host; None where there is no shared memory to be had."""
    if not supported():
        why = "memory is shared on Linux and x86-64 alone"
        logger.warning("rank %d: %s; bytes go over connections instead, which is slower", rank, why)
        return None
    try:
        return Neighbours(rank, world)
    except OSError as error:
        logger.warning("rank %d: no shared memory: %s; bytes go over connections instead", rank, error)
        return None
