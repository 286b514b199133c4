"""Parcels: memory by which a rank hands tensors to others of its host."""

from __future__ import annotations

import os
from collections import deque

import pytest
import torch

from retrograde.transport.mapped.arena import Arena, PeerArena
from retrograde.transport.mapped.mailbox import control_length
from retrograde.transport.mapped.parcels import _REST, Parcels
from retrograde.transport.messages import SharedPlace

WORLD = 3


def _parcels() -> tuple[Arena, PeerArena, Parcels]:
    arena = Arena(WORLD, control_length(WORLD))
    return arena, PeerArena(arena.share(), WORLD, control_length(WORLD)), Parcels(arena, WORLD)


def _blocks(arena: Arena) -> int:
    return os.fstat(arena.descriptor).st_blocks


def test_a_parcel_is_the_receivers_until_nobody_refers_to_it() -> None:
    _, peer, parcels = _parcels()
    pieces = [torch.arange(3.0), torch.arange(5.0)]
    first = parcels.make(pieces, 1)
    part = peer.unpack(first, 8, torch.float32, 1)
    assert torch.equal(part, torch.cat(pieces))
    second = parcels.make(pieces, 1)
    assert second != first
    view = part[2:]
    del part
    assert parcels.make(pieces, 1) not in (first, second), "a view keeps it"
    del view
    assert parcels.make(pieces, 2) == first


@pytest.mark.parametrize("numel", (0, 3, 2**16, 2**17))  # copied in one call, at its limit, and by torch
def test_a_parcel_of_any_tensors_is_copied_out_again(numel: int) -> None:
    _, peer, parcels = _parcels()
    plain = torch.arange(float(numel), requires_grad=True)
    conjugated = torch.complex(plain, -plain).detach().conj()
    odd = torch.arange(3, dtype=torch.uint8)  # what comes after it is not aligned
    sent = [odd, plain, conjugated, conjugated.imag, plain.detach().repeat(2)[::2], plain.detach().bfloat16()]
    place = parcels.make(sent, 1)
    at = 0
    for each in sent:
        made = torch.empty(each.shape, dtype=each.dtype)
        peer.copy_out(place, at, made)
        assert torch.equal(made, each) and not made.requires_grad
        at += each.nbytes
    assert at == place.nbytes
    with pytest.raises(OSError, match=r"1 bytes at .* are not in"):
        peer.copy_out(place, at, torch.empty(1, dtype=torch.uint8))
    peer.give_back(place, 1)
    assert parcels.make(sent, 1) == place


def test_memory_of_parcels_is_given_back_when_it_has_not_been_needed_for_long() -> None:
    arena, peer, parcels = _parcels()
    empty = _blocks(arena)
    places = [parcels.make([torch.ones(10**5)], 1) for _ in range(9)]
    each, rest = divmod(_blocks(arena) - empty, len(places))
    assert rest == 0
    parts = [peer.unpack(place, 10**5, torch.float32, 1) for place in places]
    for _ in range(_REST * WORLD):
        peer.give_back(parcels.make([torch.ones(1)], 2), 2)
    kept = _blocks(arena) - empty
    assert kept >= 9 * each, "all of them are referred to"
    del parts
    parcels.collect()
    assert _blocks(arena) - empty == kept, "they have just been used"
    for _ in range(_REST * (WORLD - 1) + 1):
        peer.give_back(parcels.make([torch.ones(10**5)], 1), 1)
    parcels.collect()
    assert _blocks(arena) - empty == each, "one after the other needs the memory of one"


def test_steps_that_are_alike_need_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lengths, for several receivers, of which some are late: as many as a step had out at once are kept."""
    _, peer, parcels = _parcels()
    lengths = [70_000] * 8 + [10**6]

    def step(late: int) -> None:
        """Make a parcel of each length for both receivers, who use each only when `late` others are there."""
        out: deque[tuple[SharedPlace, int]] = deque()
        for length in lengths:
            for receiver in (1, 2):
                out.append((parcels.make([torch.ones(length)], receiver), receiver))
                if len(out) > late:
                    place, receiver = out.popleft()
                    peer.give_back(place, receiver)
        while out:
            place, receiver = out.popleft()
            peer.give_back(place, receiver)

    step(late=7)
    reserve, reserved = Arena.reserve, []
    monkeypatch.setattr(Arena, "reserve", lambda self, nbytes: reserved.append(nbytes) or reserve(self, nbytes))
    for late in (2, 7, 0, 5):
        step(late)
    assert reserved == []
    step(late=9)  # two more than ever before
    assert len(reserved) == 2


def test_a_rank_that_was_late_costs_no_memory_for_long() -> None:
    """Of what one step had out at once, the next ones keep five for each other rank."""
    arena, peer, parcels = _parcels()
    empty = _blocks(arena)
    places = [parcels.make([torch.ones(10**5)], 1) for _ in range(30)]
    each = (_blocks(arena) - empty) // len(places)
    for place in places:
        peer.give_back(place, 1)
    parcels.collect()
    assert _blocks(arena) - empty == 5 * (WORLD - 1) * each


def test_a_parcel_may_have_memory_of_another_length_within_a_factor_of_two() -> None:
    _, peer, parcels = _parcels()
    large, small = parcels.make([torch.ones(10**5)], 1), parcels.make([torch.ones(60_000)], 1)
    for place in (large, small):
        peer.give_back(place, 1)
    assert parcels.make([torch.ones(40_000)], 1).offset == small.offset, "the smallest that has room"
    assert parcels.make([torch.ones(55_000)], 1).offset == large.offset
    for place in (large, small):
        peer.give_back(place, 1)
    assert parcels.make([torch.ones(20_000)], 1).offset not in (large.offset, small.offset)
    assert parcels.make([torch.ones(110_000)], 1).offset not in (large.offset, small.offset)


class _SetAfterALook:
    """A receiver's flag that is set as soon as the owner has seen that it is not."""

    def __init__(self) -> None:
        self.looks = 0

    def __getitem__(self, receiver: int) -> int:
        self.looks += 1
        return int(self.looks > 1)


def test_a_parcel_whose_flag_is_set_meanwhile_is_used_the_next_time() -> None:
    _, _, parcels = _parcels()
    parcels.make([torch.ones(10)], 1)
    ((stretch, _),) = parcels._out
    stretch.memory = _SetAfterALook()  # type: ignore[assignment]
    parcels.collect()
    assert parcels._out == [(stretch, 1)] and parcels._spare == []
    parcels.collect()
    assert parcels._out == [] and [spare.stretch for spare in parcels._spare] == [stretch]
