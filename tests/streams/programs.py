"""Programs for the simulated device, made of the engine's own buckets, strategy, pool and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.devices import Stream
from retrograde.devices.simulated import SimulatedDevice, SimulatedStream
from retrograde.gradients.bucket import Bucket
from retrograde.gradients.gradient import Gradient
from retrograde.gradients.strategy import OrderedSum
from retrograde.layout import Grid, Layout, Policy
from retrograde.ledger import Ledger
from retrograde.pages import BufferPool, Unit
from retrograde.transport import Key, Memory, Use

Check = Callable[[], list[str]]
SHAPES = (16, 16, 47)  # two small parameters and one that is sent from where it is; 80 elements over 2 ranks
USES = (Use.ACCUMULATED,) * 3
PEER = 64.0  # what the other rank's gradient consists of


class Done:
    def wait(self, stream: Stream) -> None:
        """It was done when it was asked for."""

    def done(self) -> bool:
        return True


class Peer:
    """A transport to one other rank, and the coherence of its pages: what is put there, and the shards and gradients
    that come from there."""

    rank = 0
    world = 2
    meetings = 0

    def __init__(self, device: SimulatedDevice, numel: int, launches: int) -> None:
        self.device = device
        self.shard_numel = numel // 2
        self.sent = [device.memory(self.shard_numel) for _ in range(launches)]
        self.shard = device.memory(self.shard_numel).fill_(PEER)

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        return stream.empty(numel, dtype)

    def put(self, key: Any, parts: dict[int, list[Tensor]]) -> Done:
        torch.cat(parts[1], out=self.sent[key.turn - 1])
        return Done()

    def arrived(self, key: Any, src: int) -> bool:
        """Nothing, before it is asked for."""
        return False

    def take(self, key: Any, src: int, unit: str) -> Tensor:
        return self.device.memory(self.shard_numel).fill_(PEER)

    def read(self, unit: Unit, page: Tensor, alone: bool) -> Done:
        unit.fetch_own(page)
        self.device.fetching.run(lambda: page[unit.layout.span(1)].copy_(self.shard))
        return Done()


class Rank:
    """One rank's units and reductions on a simulated device."""

    def __init__(self, device: SimulatedDevice, units: int, launches: int) -> None:
        self.device = device
        self.layout = Layout([(f"p{i}", torch.Size([n])) for i, n in enumerate(SHAPES)], torch.float32, 2)
        self.grid = Grid.line(0, 2)
        self.peer = Peer(device, self.layout.padded_numel, launches)
        self.pool = BufferPool(Memory.BUCKET, self.peer, device, Ledger())
        self.pages = BufferPool(Memory.PAGE, self.peer, device, Ledger())
        self.pool.limit, self.pages.limit = self.layout.page_bytes, 2 * self.layout.page_bytes
        self.strategy = OrderedSum(self.peer, self.grid, Policy.of(3, 0, "mean", True), self.pool)  # type: ignore[arg-type]
        self.units = [self._unit(index) for index in range(units)]
        self.faults: list[Callable[[], str | None]] = []

    def _unit(self, index: int) -> Unit:
        shard = self.device.memory(self.layout.shard_numel).fill_(0.0)
        leaves = [nn.Parameter(shard[self.layout.piece(slot, 0)]) for slot in self.layout.slots]
        return Unit(index, f"unit {index}", self.layout, leaves, shard, self.grid, self.pages, self.peer)  # type: ignore[arg-type]

    def bucket(self, kept: dict[int, Tensor]) -> Bucket:
        return Bucket("a unit", self.layout, self.layout.dtype, self.pool, kept)

    def gradient(self, stream: SimulatedStream, slot: int, value: float) -> Tensor:
        """Computed on `stream`."""
        grad = self.device.memory(SHAPES[slot])
        stream.run(lambda: grad.fill_(value))
        return grad

    def launch(self, unit: Unit, bucket: Bucket, number: int) -> Gradient:
        gradient = Gradient(unit, bucket)
        own = self.device.reducing.empty(self.layout.shard_numel, self.layout.dtype)
        gradient.send(Key(unit.index, 0, 0, number), USES, own)
        bucket.close(self.device.reducing)
        self.strategy.launch(gradient)
        return gradient

    def sum_up(self, gradient: Gradient, values: tuple[float, ...], number: int) -> None:
        """And use the result on the current stream; `values` is what the slots must hold."""
        total = self.strategy.total(gradient, {0: USES, 1: USES})
        used = self.device.memory(total.numel())
        self.device.current().run(lambda: used.copy_(total))
        flat = torch.cat([torch.full((n,), v) for n, v in zip(SHAPES, values, strict=True)] + [torch.zeros(1)])
        mine, theirs = flat.chunk(2)
        self.expect(f"reduced gradient {number}", used, (mine + PEER) / 2)
        self.expect(f"what rank 1 got of gradient {number}", self.peer.sent[number - 1], theirs)

    def expect(self, what: str, got: Tensor, want: Tensor) -> None:
        self.faults.append(lambda: None if torch.equal(got, want) else f"{what} is {got.tolist()}, not {want.tolist()}")

    def check(self) -> list[str]:
        return [text for fault in self.faults if (text := fault()) is not None]


def producers(
    streams: int, reductions: int, pages: int, keeping: bool = True, late: bool = False
) -> Callable[[SimulatedDevice], Check]:
    """Gradients from up to three streams go into buckets that share their memory, one after the other, while pages are
    fetched into memory that they share too. `late`: the other rank's part has not come when a bucket is given back."""

    def program(device: SimulatedDevice) -> Check:
        rank = Rank(device, max(reductions, pages, 1), reductions)
        sources = [device.stream(f"producer {number}") for number in range(streams)]
        for number in range(1, max(reductions, pages) + 1):
            if number <= pages:
                _fetch(rank, number)
            if 1 < number <= pages:
                _use(rank, number - 1)  # while the one after it is on its way
            if number <= reductions:
                _reduction(rank, sources, number, keeping, late)
        if pages:
            _use(rank, pages)
        return rank.check

    return program


def _reduction(rank: Rank, sources: list[SimulatedStream], number: int, keeping: bool, late: bool) -> None:
    device, values = rank.device, (number + 1.0, number + 2.0, number + 3.0)
    chosen = [sources[slot % len(sources)] for slot in range(3)]
    grads = [rank.gradient(stream, slot, values[slot]) for slot, stream in enumerate(chosen)]
    unit = rank.units[number - 1]
    bucket = rank.bucket({2: grads[2]} if keeping else {})
    for slot, stream in enumerate(chosen):
        with device.on(stream):
            bucket.add([grad if index == slot else None for index, grad in enumerate(grads)])
    gradient = rank.launch(unit, bucket, number)
    if not late:
        rank.sum_up(gradient, values, number)
    rank.strategy.finish_sending()
    # Autograd has let go of the gradients: what their streams compute next may lie there.
    for stream, grad in zip(chosen, grads, strict=True):
        stream.run(lambda grad=grad: grad.fill_(-1.0))
    if late:
        rank.sum_up(gradient, values, number)


def _fetch(rank: Rank, number: int) -> None:
    """A step writes the shard, and its page is fetched."""
    unit = rank.units[number - 1]
    rank.device.current().run(lambda: unit.shard.fill_(float(number)))
    unit.load()


def _use(rank: Rank, number: int) -> None:
    """The page is read on the current stream and dropped."""
    unit = rank.units[number - 1]
    unit.finish_loading()
    used, page = rank.device.memory(rank.layout.padded_numel), unit.page.memory
    rank.device.current().run(lambda: used.copy_(page))
    rank.expect(f"page {number}", used, torch.tensor([float(number)] * 40 + [PEER] * 40))
    assert unit.drop_unless_held()


def kept(device: SimulatedDevice) -> Check:
    """Two streams add to the same parameter of a bucket that waits; a bucket that is forgotten is used again."""
    rank = Rank(device, 2, 1)
    first, second = device.stream("producer 0"), device.stream("producer 1")
    forgotten = rank.bucket({})
    with device.on(first):
        forgotten.add([rank.gradient(first, 0, 100.0), None, None])
    forgotten.discard()
    bucket = rank.bucket({})
    for stream, value in ((second, 1.0), (first, 2.0)):
        with device.on(stream):
            bucket.add([rank.gradient(stream, 0, value), None, None])
    rank.sum_up(rank.launch(rank.units[1], bucket, 1), (3.0, 0.0, 0.0), 1)
    return rank.check


def kept_in_place(device: SimulatedDevice) -> Check:
    """Another stream adds to a gradient that waits where it is. Its memory is used again when it has been sent."""
    rank = Rank(device, 2, 1)
    first, second = device.stream("producer 0"), device.stream("producer 1")
    grads = [rank.gradient(first, 0, 1.0), rank.gradient(second, 0, 2.0)]
    bucket = rank.bucket({0: grads[0]})
    for stream, grad in zip((first, second), grads, strict=True):
        with device.on(stream):
            bucket.add([grad, None, None])
    rank.sum_up(rank.launch(rank.units[1], bucket, 1), (3.0, 0.0, 0.0), 1)
    rank.strategy.finish_sending()
    first.run(lambda: grads[0].fill_(-1.0))
    return rank.check


def pages_of_two_streams(device: SimulatedDevice) -> Check:
    """A page is used and dropped on one stream, and its memory fetched into for another."""
    rank = Rank(device, 2, 0)
    for number, stream in ((1, device.stream("one")), (2, device.stream("other"))):
        with device.on(stream):
            _fetch(rank, number)
            _use(rank, number)
    return rank.check
