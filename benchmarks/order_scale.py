"""What a step costs a rank, for worlds of 8 to 16,384: counted, not timed.

    python -m benchmarks.order_scale [--worlds 8,64,512] [--fan-out 32]

The first table is what ranks say to agree on the order of collectives: the classes of `retrograde.transport.order` as
the engine has them (nothing is guessed before the first step, nothing issued in advance), one participant for each
rank, over an imagined network in which every message takes one *hop*. Kinds of steps:

- the first: nothing is foreseen, every want is asked for;
- alike: every rank does what was foreseen;
- a late rank: it stops before its first gather, all others nudge, and it leaves the order until the step;
- a surprise: every rank wants one page that was not foreseen. That takes three grants: the page, and
  twice what follows.

The second table is what a step moves, by the ledger of the engine among imagined ranks (`FakeRanks`).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from retrograde.engine.shard import Options, shard_over
from retrograde.transport import FakeRanks
from retrograde.transport.order import (
    STEP,
    Effect,
    Gather,
    OrderPolicy,
    Participant,
    Reduce,
    Send,
    Serve,
    Settle,
    Timer,
    Tree,
    Want,
    encode,
)

WORLDS = (8, 64, 512, 4096, 16384)
UNITS = 4
LAYERS, WIDTH = 8, 1024
WANTS: tuple[Want, ...] = (
    *(Gather(unit) for unit in range(UNITS)),
    *(want for unit in reversed(range(UNITS)) for want in (Gather(unit), Reduce(unit))),
)


class Cost(NamedTuple):
    """Of one step."""

    messages: int  # of all ranks
    busiest: int  # sent and received by the rank that has most of them
    kilobytes: float  # the same, of the rank that has most
    hops: int  # one after the other


class Network:
    """Participants and what is on its way between them."""

    def __init__(self, world: int, policy: OrderPolicy) -> None:
        self.world = world
        self.ranks = [Participant(rank, world, policy) for rank in range(world)]
        self.links: set[tuple[int, int]] = set()
        self._travelling: list[tuple[int, int, Send]] = []
        self._events: Counter[type] = Counter()
        self._served: list[int] = [0] * world  # the call that each rank needed last
        self._clear()

    def _clear(self) -> None:
        self._messages = 0
        self._hops = 0
        self._per_rank: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()

    # ---- steps
    def step(self, wants: Sequence[Want] = WANTS) -> Cost:
        for want in wants:
            for rank in range(self.world):
                self._do(rank, self.ranks[rank].want(want))
            self._deliver()
        return self._end()

    def late_step(self, late: int) -> Cost:
        """All other ranks wait for their second page, and say so. The late one leaves the order until the step."""
        others = [rank for rank in range(self.world) if rank != late]
        for rank in others:
            self._do(rank, self.ranks[rank].want(WANTS[0]))
            self._do(rank, self.ranks[rank].want(WANTS[1]))
        for rank in others:
            self._do(rank, self.ranks[rank].overdue(self._served[rank]))
        self._deliver()
        self._run_out(Timer.PARTIAL)
        self._run_out(Timer.NUDGES)
        for rank in range(self.world):
            for want in WANTS[0 if rank == late else 2 :]:
                self._do(rank, self.ranks[rank].want(want))
        return self._end()

    def _end(self) -> Cost:
        self._events.clear()
        for rank in range(self.world):
            self._do(rank, self.ranks[rank].arrive(STEP))
        self._deliver()
        assert self._events[Settle] == self.world, "all ranks have come to the step"
        for rank in range(self.world):
            self._do(rank, self.ranks[rank].rest())
        found = Cost(self._messages, max(self._per_rank.values()), max(self._bytes.values()) / 1024, self._hops)
        self._clear()
        return found

    # ---- messages
    def _do(self, rank: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._events[type(effect)] += 1
            if isinstance(effect, Serve):
                self._served[rank] = effect.call.number
            elif isinstance(effect, Send):
                self._count(rank, effect)
                self._travelling.append((rank, effect.to, effect))

    def _count(self, rank: int, send: Send) -> None:
        size = len(encode(send.message))
        self._messages += 1
        for end in (rank, send.to):
            self._per_rank[end] += 1
            self._bytes[end] += size
        self.links.add((min(rank, send.to), max(rank, send.to)))

    def _deliver(self) -> None:
        while self._travelling:
            self._hops += 1
            now, self._travelling = self._travelling, []
            for source, to, send in now:
                self._do(to, self.ranks[to].message(source, send.message))

    def _run_out(self, timer: Timer) -> None:
        """Whoever waits so long for the rest is told that it has waited enough; from the leaves to the root."""
        for rank in reversed(range(self.world)):
            for alarm in self.ranks[rank].alarms():
                if alarm.timer is timer:
                    self._do(rank, self.ranks[rank].timeout(alarm))
                    self._deliver()

    def connections(self) -> int:
        """Of the rank that has most."""
        ends = Counter(end for link in self.links for end in link)
        return max(ends.values())


def row(world: int, fan_out: int) -> str:
    network = Network(world, OrderPolicy(fan_out=fan_out, depth=0))
    first = network.step()
    alike = network.step()
    late = network.late_step(world - 1)
    surprise = network.step((*WANTS[:1], Gather(UNITS), *WANTS[1:]))
    depth = Tree(world, fan_out).depth
    assert alike.messages == 2 * (world - 1)
    cells = [world, depth, network.connections(), alike.messages, alike.busiest, f"{alike.kilobytes:.1f}", alike.hops]
    cells += [first.busiest, first.hops]
    cells += [f"{surprise.busiest - alike.busiest}", surprise.hops - alike.hops]
    cells += [f"{late.busiest - alike.busiest}", late.hops - alike.hops]
    return _row(cells)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


HEADER = (
    "world",
    "depth of the tree",
    "connections, busiest rank",
    "messages of a step, all ranks",
    "of the busiest rank",
    "KiB, busiest rank",
    "hops one after the other",
    "the first step: messages, busiest rank",
    "hops",
    "a surprise: messages more, busiest rank",
    "hops more",
    "a late rank: messages more, busiest rank",
    "hops more",
)


# ---- what a step moves
def moved(world: int) -> str:
    """Of the last rank, in the second step of some square layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine = shard_over(FakeRanks(world, rank=world - 1), model, Options(stage=3, units=nn.Linear))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        engine.ledger.clear()
        model(torch.randn(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shard = sum(unit.layout.shard_bytes for unit in engine.units)
    page = sum(unit.layout.page_bytes for unit in engine.units)
    counts = [engine.ledger.count(kind) for kind in ("gather", "reduce")]
    sizes = [page, engine.ledger.bytes("gather"), engine.ledger.bytes("reduce")]
    cells = [world, *counts, f"{shard / 1024:.1f}", *(f"{size / 2**20:.2f}" for size in sizes), 2 * world]
    return _row(cells)


MOVED = (
    "world",
    "gathers",
    "reductions",
    "KiB of a shard",
    "MiB of the model, with padding",
    "that come by gathers",
    "that go by reductions",
    "entries of the store read at the start",
)


def _print_head(names: Sequence[str]) -> None:
    print(_row(names))
    print("|" + "---:|" * len(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--fan-out", type=int, default=OrderPolicy().fan_out)
    given = parser.parse_args()
    worlds = [int(world) for world in given.worlds.split(",")]
    _print_head(HEADER)
    for world in worlds:
        print(row(world, given.fan_out), flush=True)
    print()
    _print_head(MOVED)
    for world in worlds:
        print(moved(world), flush=True)


if __name__ == "__main__":
    main()
