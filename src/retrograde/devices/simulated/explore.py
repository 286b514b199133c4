"""Every order in which a device may run what was issued to it.

[Note: exploration]
A state is how far each stream has come and what is in memory: what can still happen depends on nothing else. Two
orders that lead to the same state have the same future, so a state is followed once, and the number of orders
is counted from the states: the number of orders from a state is the sum over its successors. No order is left out.
Passing a mark or a wait whose event has happened changes no memory and hinders nobody, so it is done at once; only
pieces of work are chosen between.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from retrograde.devices.simulated.device import Mark, Run, SimulatedDevice, SimulatedStream, Site, Wait
from retrograde.errors import RetrogradeError

MemoryCheck = Callable[[], list[str]]  # what is wrong in memory when all work is done
Program = Callable[[SimulatedDevice], MemoryCheck]  # issues work, and says how to check its result
Interleaving = tuple[int, ...]  # the streams in the order in which they run their next piece of work


class Corrupted(RetrogradeError):
    """An order of the device's work that gives a wrong result."""

    def __init__(self, interleaving: Interleaving, steps: list[str], faults: list[str], tried: int) -> None:
        order = "\n".join(f"  {number + 1}. {step}" for number, step in enumerate(steps))
        super().__init__(f"after {tried} orders, a wrong one:\n{order}\ngives " + "; ".join(faults))
        self.interleaving = interleaving
        self.faults = faults
        self.tried = tried


class Stuck(RetrogradeError):
    """Streams wait for events that never happen."""


@dataclass(frozen=True, slots=True)
class Explored:
    """How many orders there are, and how many states they pass through."""

    interleavings: int
    states: int


class Snapshot(NamedTuple):
    """A state: how far each stream has come, and what is in memory."""

    at: tuple[int, ...]
    memory: bytes


class _Machine:
    """A program and how far it has come."""

    def __init__(self, program: Program, without: Site | None) -> None:
        self.device = SimulatedDevice(without)
        self.check = program(self.device)
        self.at = [0] * len(self.device.streams)
        self.done: list[int] = []
        self._views = [t.view(torch.uint8).numpy() for t in self.device.tensors]
        self._pass()

    def ready(self) -> list[int]:
        """Streams whose next piece of work may run. Empty at the end."""
        waiting = [s for s in self.device.streams if self.at[s.number] < len(s.queue)]
        ready = [s.number for s in waiting if isinstance(s.queue[self.at[s.number]], Run)]
        if waiting and not ready:
            raise Stuck("these streams wait for each other: " + ", ".join(s.name for s in waiting))
        return ready

    def run(self, number: int) -> None:
        step = self.device.streams[number].queue[self.at[number]]
        assert isinstance(step, Run)
        step.work()
        self.at[number] += 1
        self.done.append(number)
        self._pass()

    def _pass(self) -> None:
        """Pass all marks, and all waits whose event has happened; passing a mark may let a wait pass."""
        moved = True
        while moved:
            moved = False
            for stream in self.device.streams:
                if self._may_pass(stream):
                    self.at[stream.number] += 1
                    moved = True

    def _may_pass(self, stream: SimulatedStream) -> bool:
        """Whether the stream's next step is a mark, or a wait whose event has happened."""
        at = self.at[stream.number]
        if at == len(stream.queue):
            return False
        step = stream.queue[at]
        if isinstance(step, Wait):
            return self.at[step.event.stream] >= step.event.place
        return isinstance(step, Mark)

    def save(self) -> Snapshot:
        return Snapshot(tuple(self.at), b"".join([view.tobytes() for view in self._views]))

    def load(self, saved: Snapshot) -> None:
        self.at[:] = saved.at
        start = 0
        for view in self._views:
            view.data.cast("B")[:] = saved.memory[start : start + view.nbytes]
            start += view.nbytes

    def verdict(self, tried: int) -> None:
        """Raise if the order that has just ended gives a wrong result."""
        faults = self.check()
        if faults:
            raise Corrupted(tuple(self.done), list(self._steps()), faults, tried)

    def _steps(self) -> Iterator[str]:
        works = [iter([step for step in s.queue if isinstance(step, Run)]) for s in self.device.streams]
        for number in self.done:
            yield next(works[number]).label


class _Exploration:
    """Follows every state of a program once."""

    def __init__(self, machine: _Machine, most_states: int) -> None:
        self._machine = machine
        self._most_states = most_states
        self._tried = 0
        self.counts: dict[Snapshot, int] = {}  # how many orders there are from each state

    def orders(self, state: Snapshot) -> int:
        """How many orders there are from `state`, in which the machine is. Each has been tried when this returns."""
        if state in self.counts:
            return self.counts[state]
        machine = self._machine
        ready = machine.ready()
        if ready:
            total = 0
            for number in ready:
                machine.load(state)
                machine.run(number)
                total += self.orders(machine.save())
                machine.done.pop()
        else:
            self._tried += 1
            machine.verdict(self._tried)
            total = 1
        self.counts[state] = total
        if len(self.counts) > self._most_states:
            raise RetrogradeError(f"more than {self._most_states} states: make the program smaller, or use sample()")
        return total


def explore(program: Program, without: Site | None = None, most_states: int = 2_000_000) -> Explored:
    """Try every order; raises `Corrupted` with the first one that gives a wrong result."""
    with torch.no_grad():
        machine = _Machine(program, without)
        exploration = _Exploration(machine, most_states)
        interleavings = exploration.orders(machine.save())
        return Explored(interleavings, len(exploration.counts))


def sample(program: Program, seeds: range, without: Site | None = None) -> int:
    """Run one random order for each seed. Returns how many differed;
    raises `Corrupted`, which names the seed to replay."""
    orders = set()
    for tried, seed in enumerate(seeds):
        draw = random.Random(seed)
        with torch.no_grad():
            machine = _Machine(program, without)
            order = []
            while ready := machine.ready():
                order.append(draw.choice(ready))
                machine.run(order[-1])
            orders.add(tuple(order))
            try:
                machine.verdict(tried + 1)
            except Corrupted as error:
                error.args = (f"seed {seed}: {error.args[0]}",)
                raise
    return len(orders)


def replay(program: Program, interleaving: Interleaving, without: Site | None = None) -> list[str]:
    """Run one order again; returns what is wrong at its end."""
    with torch.no_grad():
        machine = _Machine(program, without)
        for number in interleaving:
            machine.run(number)
        return machine.check()
