"""Shared memory between ranks of one host: letters, stretches of an arena, and what a training step sends besides."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import platform
import stat
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.transport.connections import Connections
from retrograde.transport.mapped import neighbours as neighbourhood
from retrograde.transport.mapped.arena import Arena, PeerArena, SharedWord
from retrograde.transport.mapped.mailbox import Mailbox, Outbox, box_length, control_length
from retrograde.transport.mapped.parcels import Parcels
from retrograde.transport.mapped.transport import MappedTransport
from retrograde.transport.messages import Share, SharedPlace
from retrograde.transport.wires import Sending
from tests.harness import Ranks
from tests.reference import play, same
from tests.small import backwards, batch, build, loss_of
from tests.stages import EACH_STAGE, WITH_OTHERS

WORLD = 3


# ---- letters
def _boxes() -> tuple[Mailbox, list[Outbox]]:
    memory = mmap.mmap(-1, control_length(WORLD))
    return Mailbox(memory, 0, WORLD), [Outbox(memory, writer, WORLD) for writer in (1, 2)]


def _letter(number: int, length: int) -> list[memoryview]:
    return [memoryview(number.to_bytes(4, "little")), memoryview(bytes([number % 251]) * length)]


def _letters(mailbox: Mailbox) -> list[tuple[int, bytearray]]:
    return [(src, letter) for src, letters in mailbox.letters() for letter in letters]


def test_letters_come_whole_and_in_order() -> None:
    """Of every length, so that they wrap around the end of the box at every place."""
    mailbox, (first, second) = _boxes()
    came: list[tuple[int, int, bytes]] = []
    for number in range(2000):
        length = (number * 37) % 1500
        assert first.post(_letter(number, length)) and second.post(_letter(number + 1, 7))
        came += [(src, int.from_bytes(data[:4], "little"), bytes(data[4:])) for src, data in _letters(mailbox)]
    assert [each for each in came if each[0] == 1] == [
        (1, number, bytes([number % 251]) * ((number * 37) % 1500)) for number in range(2000)
    ]
    assert [number for src, number, _ in came if src == 2] == list(range(1, 2001))


def test_letters_that_a_look_has_left_are_found_by_the_next() -> None:
    mailbox, (first, second) = _boxes()
    for number in range(3):
        assert first.post(_letter(number, 1)) and second.post(_letter(number, 1))
    look = mailbox.letters()
    _, letters = next(look)
    next(letters)
    look.close()  # interrupted, and nobody rings again
    assert len(_letters(mailbox)) == 5


def test_boxes_are_looked_at_when_somebody_has_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, (first, _) = _boxes()
    looks: list[int] = []
    for peer, box in mailbox._boxes.items():
        monkeypatch.setattr(box, "take", lambda peer=peer, take=box.take: looks.append(peer) or take())
    assert _letters(mailbox) == _letters(mailbox) == []
    assert looks == [1, 2], "once, when nobody knows what the bell has been"
    assert first.post(_letter(7, 0))
    assert [src for src, _ in _letters(mailbox)] == [1] and _letters(mailbox) == []
    assert looks == [1, 2, 1, 1, 2]


def test_a_full_box_takes_no_more() -> None:
    mailbox, (first, second) = _boxes()
    posted = 0
    while first.post(_letter(posted, 1000)):
        posted += 1
    assert (box_length(WORLD) - 8) // 1016 <= posted <= box_length(WORLD) // 1012
    assert second.post(_letter(0, 1000))  # it has a box of its own
    assert not first.post(_letter(0, box_length(WORLD)))
    assert sum(src == 1 for src, _ in _letters(mailbox)) == posted
    assert first.post(_letter(0, 1000))


def test_counters_are_alone_in_their_cache_lines() -> None:
    """So that each is stored at once, whatever the number of ranks."""
    for world in range(2, 130):
        memory = mmap.mmap(-1, control_length(world))
        boxes = Mailbox(memory, 0, world)._boxes.values()
        counters = [counter for box in boxes for counter in (box._written, box._taken)]
        places = [ctypes.addressof(ctypes.c_uint64.from_buffer(counter)) for counter in counters]
        assert len(set(places)) == 2 * (world - 1) and not any(place % 64 for place in places), world


def test_who_sleeps_is_woken_and_a_letter_before_it_is_not_missed() -> None:
    mailbox, (first, _) = _boxes()
    heard = mailbox.heard
    first.post(_letter(1, 1))
    mailbox.sleep(heard, 60.0)  # returns at once: it rang since
    heard = mailbox.heard
    ringer = threading.Timer(0.05, first.ring)
    ringer.start()
    mailbox.sleep(heard, 60.0)
    ringer.join()
    assert mailbox.heard != heard


# ---- an arena
def _arena() -> tuple[Arena, PeerArena]:
    arena = Arena(WORLD, control_length(WORLD))
    return arena, PeerArena(arena.share(), WORLD, control_length(WORLD))


def _nothing() -> None:
    pass


def _blocks(arena: Arena) -> int:
    return os.fstat(arena.descriptor).st_blocks


def test_what_one_rank_writes_another_reads_in_place() -> None:
    arena, peer = _arena()
    mine = arena.allocate(1000, torch.float32, _nothing)
    assert mine.data_ptr() % 64 == 0 and mine.storage_offset() == 0
    place = arena.place_of(mine[10:30])
    assert place is not None
    theirs = peer.view(place, 20, torch.float32)
    mine.copy_(torch.arange(1000.0))
    assert torch.equal(theirs, torch.arange(10.0, 30.0))
    assert arena.place_of(mine[::2]) is None and arena.place_of(torch.ones(3)) is None
    assert arena.place_of(arena.allocate(0, torch.float32, _nothing)) is None


def test_memory_is_given_back_and_its_place_used_again() -> None:
    arena, _ = _arena()
    empty, went = _blocks(arena), []
    first = arena.allocate(10**6, torch.uint8, lambda: went.append(_blocks(arena)))
    place = arena.place_of(first)
    held = _blocks(arena)
    assert held - empty >= 10**6 // 512
    view = first[5:]
    del first
    assert not went, "a view keeps it"
    del view
    assert went == [held], "said before it goes"
    assert _blocks(arena) == empty
    assert arena.place_of(arena.allocate(10**6, torch.uint8, _nothing)) == place


def test_a_forked_process_gives_nothing_back() -> None:
    arena, _ = _arena()
    mine = arena.allocate(1000, torch.float32, _nothing)
    mine.fill_(3.0)
    child = os.fork()
    if child == 0:
        del mine
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(mine, torch.full((1000,), 3.0))


def test_descriptors_are_few_however_much_is_shared() -> None:
    """A program may have a thousand of them, and may run for a million steps."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    arena, peer = _arena()
    parcels = Parcels(arena, WORLD)
    before = descriptors()
    shards = [arena.allocate(1000 + number, torch.float32, _nothing) for number in range(200)]
    places = [arena.place_of(shard) for shard in shards]
    seen = [peer.view(place, 1000, torch.float32) for place in places if place is not None]
    assert len(seen) == len(shards)
    assert descriptors() - before <= 2
    for number in range(500):  # of other lengths, in the same places
        parcel = peer.unpack(parcels.make([torch.ones(1 + number)], 1), 1 + number, torch.float32, 1)
        assert torch.equal(parcel, torch.ones(1 + number))
    assert descriptors() - before <= 2
    large = arena.allocate(2**25, torch.float32, _nothing)  # more than the arena has grown to
    place = arena.place_of(large)
    assert place is not None
    assert peer.view(place, 2**25, torch.float32)[-1] == large[-1]
    assert descriptors() - before <= 4
    shards[-1].fill_(3.0)
    assert seen[-1][0] == 3.0, "what was mapped before stays"


def test_an_arena_is_its_users_alone() -> None:
    assert stat.S_IMODE(os.fstat(Arena(2, control_length(2)).descriptor).st_mode) == 0o600


def test_a_machine_on_which_memory_is_not_shared_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert neighbourhood.neighbours_of(1, 2) is None
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1: memory is shared on Linux and x86-64 alone; bytes go over connections instead, which is slower"
    ]


def test_what_is_not_an_arena_is_not_mapped(tmp_path: Any) -> None:
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(control_length(WORLD))
        found = os.fstat(file.fileno())
        with pytest.raises(OSError):
            PeerArena(Share(os.getpid(), file.fileno(), found.st_dev, found.st_ino), WORLD, control_length(WORLD))
    with pytest.raises(OSError):
        PeerArena(Share(os.getpid(), 10**6, found.st_dev, found.st_ino), WORLD, control_length(WORLD))


def test_another_arena_at_the_same_place_is_not_mapped() -> None:
    """As in another process namespace, where the same numbers are those of another process."""
    one, other = Arena(WORLD, control_length(WORLD)), Arena(WORLD, control_length(WORLD))
    mistaken = Share(os.getpid(), other.descriptor, one.share().device, one.share().inode)
    with pytest.raises(OSError, match=f"descriptor {other.descriptor} of process {os.getpid()} is not its arena"):
        PeerArena(mistaken, WORLD, control_length(WORLD))


@pytest.mark.parametrize("place", (SharedPlace(4096, 2**40, 0), SharedPlace(100, 8, 0), SharedPlace(0, 8, 4)))
def test_what_lies_outside_an_arena_is_not_read(place: SharedPlace) -> None:
    _, peer = _arena()
    with pytest.raises(OSError):
        peer.view(place, 2, torch.float32)


def test_a_word_that_is_closed_stays() -> None:
    arena, peer = _arena()
    word = SharedWord(arena)
    seen = peer.word(word.place)
    word.set(7)
    assert seen[0] == 7
    peer.flags(word.place)[2] = 1
    assert word.take_flags() == [2] and word.take_flags() == []
    word.close(9)
    word.set(8)
    assert seen[0] == 9


# ---- ranks
def _messages(rank: int, world: int, stage: int) -> tuple[list[str], list[str]]:
    """What goes over connections in the third step, and whether it is exact."""
    model, plain = build(), build()
    engine = rg.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sent: Counter[str] = Counter()
    send = Connections.send

    def counted(self: Connections, dst: int, message: Any, data: Any = ()) -> Sending:
        sent[type(message).__name__] += 1
        return send(self, dst, message, data)

    assert isinstance(engine.transport, MappedTransport)
    for _ in range(2):
        backwards(0)(model, rank)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    Connections.send = counted  # type: ignore[method-assign]
    try:
        backwards(0, 1)(model, rank)
        optimizer.step()
    finally:
        Connections.send = send  # type: ignore[method-assign]
    grads = engine.full_grads()
    play(plain, world, backwards(0, 1), stage)
    dist.barrier()
    wrong = [name for name, param in plain.named_parameters() if not same(grads[name], param.grad)]
    return list(sent), wrong


@EACH_STAGE
@WITH_OTHERS
def test_a_step_sends_nothing_over_connections(ranks: Ranks, stage: int, world: int) -> None:
    assert ranks(world).run(_messages, stage) == [([], [])] * world


def _hinder(patch: pytest.MonkeyPatch, world: int, whose: str) -> None:
    """This rank cannot map others' memory, can make none, or finds another rank's where one's should be."""

    def refuse(*args: Any) -> Any:
        raise OSError("not here")

    if whose != "another":
        patch.setattr(neighbourhood, whose, refuse)
        return
    other, plain_stat = Arena(world, control_length(world)), os.stat

    def stat_of_other(path: Any, **options: Any) -> os.stat_result:
        return os.fstat(other.descriptor) if str(path).startswith("/proc/") else plain_stat(path, **options)

    patch.setattr(os, "stat", stat_of_other)


def _unmappable(rank: int, world: int, whose: str) -> tuple[list[str], list[str]]:
    """Train where rank 0 is hindered."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("retrograde").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                _hinder(patch, world, whose)
            group = dist.new_group()
            model, plain = build(), build()
            engine = rg.shard(model, 3, process_group=group)
            backwards(0, 1)(model, rank)
            grads = engine.full_grads()
            play(plain, world, backwards(0, 1), 3)
            _step_late(engine, rank)
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            weights = model.state_dict()
            dist.barrier()
    finally:
        logging.getLogger("retrograde").removeHandler(handler)
    wrong = [name for name, param in plain.named_parameters() if not same(grads[name], param.grad)]
    return said, wrong + [name for name, param in plain.named_parameters() if not torch.equal(weights[name], param)]


def _step_late(engine: rg.Engine, rank: int) -> None:
    """Rank 0 stays in its step until another rank has said that it waits for rank 0's shards."""
    end_step = engine.coordinator.end_step

    def end_late() -> None:
        if isinstance(engine.transport, MappedTransport):
            deadline = time.monotonic() + 20.0
            while not any(engine.transport._state._flags):
                assert time.monotonic() < deadline, "nobody waits"
                time.sleep(0.001)
        end_step()

    if rank == 0:
        engine.coordinator.end_step = end_late  # type: ignore[method-assign]
    torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
    loss_of(engine.model, batch(rank))


@pytest.mark.parametrize("whose", ("PeerArena", "Arena", "another"))
def test_where_memory_cannot_be_shared_bytes_go_over_connections(ranks: Ranks, whose: str) -> None:
    (said, wrong), *others = ranks(3).run(_unmappable, whose)
    assert len(said) == 1 and said[0].startswith("rank 0") and "connections" in said[0] and wrong == []
    assert others == [([], [])] * 2


def _trained(rank: int, timeout: float) -> nn.Module:
    """Two steps: other ranks know where the shards lie."""
    model = build()
    rg.shard(model, 3, timeout=timeout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return model


def _read_of_a_model_that_is_gone(rank: int, world: int) -> str:
    model = _trained(rank, timeout=5.0)
    if rank == 1:
        del model
        gc.collect()
        dist.barrier()
        dist.barrier()
        return ""
    dist.barrier()
    try:
        model.state_dict()
    except rg.DivergenceError as error:
        return str(error)
    finally:
        dist.barrier()
    return "it was read"


def test_memory_of_a_model_that_is_gone_is_not_read(ranks: Ranks) -> None:
    assert "rank 1 has let go of this model" in ranks(2).run(_read_of_a_model_that_is_gone)[0]


def _exposed(rank: int, world: int) -> str:
    """Rank 1 writes to its own elements, which nobody reports, before rank 0 has read them."""
    model = _trained(rank, timeout=2.0)
    if rank == 1:
        for leaf in model.parameters():
            leaf.local.add_(1.0)  # type: ignore[attr-defined]
    dist.barrier()
    try:
        if rank == 0:
            model.state_dict()
            return "it was read"
    except rg.DivergenceError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_elements_that_were_given_out_are_asked_for(ranks: Ranks) -> None:
    assert "not edited in the same way as the reader's" in ranks(2).run(_exposed)[0]
