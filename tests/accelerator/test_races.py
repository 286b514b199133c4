"""The happens-before checker, without torch: it finds what nothing orders, in every order of execution, and no more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.accelerator.laboratory import laboratory
from tests.accelerator.ranks import EACH_MODE, alone, each_case
from tests.harness import Ranks

CELLS = (0, 16)
HALVES = ((0, 8), (8, 16))


def write_then_read(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "write", writes=[CELLS])
    lab.issue(1, "read", reads=[HALVES[1]])
    assert lab.races() == [("write", "read")]


def read_then_write(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "read", reads=[CELLS])
    lab.issue(1, "write", writes=[HALVES[0]])
    assert lab.races() == [("read", "write")]


def readers_and_halves_do_not_race(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "read", reads=[CELLS])
    lab.issue(1, "read", reads=[CELLS])
    lab.issue(2, "left", writes=[(16, 24)])
    lab.issue(3, "right", writes=[(24, 32)])
    assert lab.races() == []


def a_wait_orders_and_a_finished_event_without_one_does_not(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "write", writes=[CELLS])
    mark = lab.record(0)
    lab.issue(0, "later", writes=[(16, 32)])
    lab.wait(1, mark)
    lab.issue(1, "read", reads=[CELLS])
    assert lab.races() == []
    lab.issue(1, "read too much", reads=[(0, 32)])
    assert lab.races() == [("later", "read too much")]


def waits_carry_on(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "write", writes=[CELLS])
    lab.wait(1, lab.record(0))
    lab.wait(2, lab.record(1))
    lab.issue(2, "overwrite", writes=[CELLS])
    assert lab.races() == []


def the_host_orders_what_it_waited_for(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "write", writes=[HALVES[0]])
    mark = lab.record(0)
    lab.issue(0, "late", writes=[HALVES[1]])
    while not lab.query(mark):
        pass
    lab.issue(1, "read", reads=[HALVES[0]])
    assert lab.races() == []
    lab.issue(1, "hasty", reads=[HALVES[1]])
    assert lab.races() == [("late", "hasty")]


def the_order_of_a_communicator_orders_no_memory(mode: str, seed: int) -> None:
    lab = laboratory(mode, seed)
    lab.issue(0, "write", writes=[CELLS])
    lab.run_after(1, lab.record(0))
    lab.issue(1, "read", reads=[CELLS])
    assert lab.races() == [("write", "read")]


def _reader_of_freed_memory(lab: Any, told: bool, waits: bool) -> list[tuple[str, str]]:
    """A side stream reads memory of stream 0, which is freed, and the next allocation there is written."""
    old = lab.allocate(64, 0)
    lab.issue(0, "fill", writes=[(old, old + 64)])
    lab.wait(1, lab.record(0))
    lab.issue(1, "read", reads=[(old, old + 64)])
    if told:
        lab.record_use(old, 1)
    lab.free(old)
    new = lab.allocate(1000, 0)
    if waits:
        lab.wait(0, lab.record(1))
    lab.issue(0, "refill", writes=[(new, new + 64)])
    return lab.races()


def memory_freed_too_early(mode: str, seed: int) -> None:
    found = _reader_of_freed_memory(laboratory(mode, seed), told=False, waits=False)
    assert found == [("read", "reuse of freed memory by refill")]


def memory_freed_and_told_or_waited_for(mode: str, seed: int) -> None:
    assert _reader_of_freed_memory(laboratory(mode, seed), told=True, waits=False) == []
    assert _reader_of_freed_memory(laboratory(mode, seed), told=False, waits=True) == []


def new_memory_on_another_stream_waits_for_its_home(mode: str, seed: int) -> None:
    """What was freed on a stream may still be in use there when another one writes the next allocation."""
    lab = laboratory(mode, seed)
    old = lab.allocate(64, 0)
    lab.issue(0, "fill", writes=[(old, old + 64)])
    lab.free(old)
    new = lab.allocate(64, 0)
    lab.issue(1, "hasty", writes=[(new, new + 64)])
    assert lab.races() == [("fill", "reuse of freed memory by hasty")]


@dataclass
class Ordered:
    """The definition, for comparison: a program's jobs, and which come before which."""

    jobs: list[tuple[str, set[int], set[int]]] = field(default_factory=list)  # name, cells read, cells written
    before: list[set[int]] = field(default_factory=list)
    streams: list[set[int]] = field(default_factory=lambda: [set() for _ in range(3)])
    host: set[int] = field(default_factory=set)

    def issue(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        self.streams[stream] |= self.host
        self.before.append(set(self.streams[stream]))
        self.streams[stream].add(len(self.jobs))
        self.jobs.append((name, reads, writes))

    def races(self) -> set[tuple[str, str]]:
        found = set()
        for later, (name, reads, writes) in enumerate(self.jobs):
            for earlier in set(range(later)) - self.before[later]:
                first, first_reads, first_writes = self.jobs[earlier]
                if first_writes & (reads | writes) or first_reads & writes:
                    found.add((first, name))
        return found


def _random_program(seed: int, lab: Any) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    draw = random.Random(seed)
    model = Ordered()
    marks: list[tuple[Any, set[int]]] = []
    for number in range(draw.randrange(4, 14)):
        stream = draw.randrange(3)
        action = draw.choice(("issue", "issue", "issue", "record", "wait", "wait", "synchronize"))
        if action == "issue":
            begin = draw.randrange(8)
            cells = range(begin, draw.randrange(begin + 1, 10))
            interval = [(cells.start, cells.stop)]
            writes = draw.random() < 0.5
            lab.issue(stream, f"job {number}", *(([], interval) if writes else (interval, [])))
            model.issue(stream, f"job {number}", set() if writes else set(cells), set(cells) if writes else set())
        elif action == "record":
            marks.append((lab.record(stream), set(model.streams[stream])))
        elif action == "wait" and marks:
            mark, known = draw.choice(marks)
            lab.wait(stream, mark)
            model.streams[stream] |= known
        elif action == "synchronize" and draw.random() < 0.3:
            lab.synchronize(stream)
            model.host |= model.streams[stream]
    return set(lab.races()), model.races()


def random_programs_agree_with_the_definition(mode: str, seed: int) -> None:
    """The checker remembers the last write and the reads after it: it need not name every pair, but all it names are
    races, and it names one if there is one."""
    racy = 0
    for number in range(400):
        found, real = _random_program(number, laboratory(mode, seed))
        assert found <= real, (number, found, real)
        assert bool(found) == bool(real), (number, real)
        racy += bool(real)
    assert 50 < racy < 350


@EACH_MODE
@each_case(
    write_then_read,
    read_then_write,
    readers_and_halves_do_not_race,
    a_wait_orders_and_a_finished_event_without_one_does_not,
    waits_carry_on,
    the_host_orders_what_it_waited_for,
    the_order_of_a_communicator_orders_no_memory,
    memory_freed_too_early,
    memory_freed_and_told_or_waited_for,
    new_memory_on_another_stream_waits_for_its_home,
    random_programs_agree_with_the_definition,
)
def test_races(late_ranks: Ranks, case: Any, mode: str, seed: int) -> None:
    late_ranks(1).run(alone, case, mode, seed)
