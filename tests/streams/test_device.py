"""The simulated device itself: what it counts, finds and refuses; and the streams of a real device."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from retrograde.devices import Stream, streams_of
from retrograde.devices.simulated import Corrupted, SimulatedDevice, Stuck, explore, replay
from retrograde.devices.streams import DeviceStream

Check = Callable[[], list[str]]


def independent(*lengths: int) -> Callable[[SimulatedDevice], Check]:
    def program(device: SimulatedDevice) -> Check:
        for number, length in enumerate(lengths):
            cell = device.memory(1).fill_(0.0)
            stream = device.stream(f"s{number}")
            for _ in range(length):
                stream.run(lambda cell=cell: cell.add_(1.0))
        return list

    return program


@pytest.mark.parametrize("lengths", [(1,), (3, 2), (2, 2, 2), (1, 4, 3)])
def test_all_orders_are_counted(lengths: tuple[int, ...]) -> None:
    orders = math.factorial(sum(lengths)) // math.prod(math.factorial(n) for n in lengths)
    explored = explore(independent(*lengths))
    assert explored.interleavings == orders
    assert explored.states == math.prod(n + 1 for n in lengths)  # orders that do not matter meet again


def ordered(wait: bool) -> Callable[[SimulatedDevice], Check]:
    """Results that depend on the order of everything: each piece of work appends its digit."""

    def program(device: SimulatedDevice) -> Check:
        word = device.memory(1, torch.float64).fill_(0.0)
        one, two = device.stream("one"), device.stream("two")
        for digit in (1, 2):
            one.run(lambda digit=digit: word.mul_(10).add_(digit))
        event = one.record()
        if wait:
            two.wait(event)
        for digit in (3, 4):
            two.run(lambda digit=digit: word.mul_(10).add_(digit))
        return lambda: [] if word.item() == 1234 else [f"the word is {word.item():.0f}"]

    return program


def test_the_first_wrong_order_is_shown_and_can_be_replayed() -> None:
    assert explore(ordered(wait=True)).interleavings == 1
    with pytest.raises(Corrupted, match=r"one: test_device\.py") as caught:
        explore(ordered(wait=False))
    assert replay(ordered(wait=False), caught.value.interleaving) == caught.value.faults
    wrong = set()
    for schedule in set(itertools.permutations([4, 4, 5, 5])):
        wrong |= set(replay(ordered(wait=False), schedule))
    assert wrong == {f"the word is {word}" for word in (1324, 1342, 3124, 3142, 3412)}


def test_memory_of_another_stream_is_not_quiet() -> None:
    def program(device: SimulatedDevice) -> Check:
        memory = device.reducing.empty(2, torch.float32)
        device.current().run(lambda: memory.fill_(1.0))
        return lambda: [] if memory.tolist() == [1.0, 1.0] else [str(memory.tolist())]

    with pytest.raises(Corrupted, match="nan"):
        explore(program)


def test_streams_that_wait_for_each_other_are_stuck() -> None:
    def program(device: SimulatedDevice) -> Check:
        one, two = device.stream("one"), device.stream("two")
        ahead = one.record()._replace(place=3)  # an event that comes after the wait below
        two.wait(ahead)
        one.wait(two.record())
        one.run(lambda: None)
        return list

    with pytest.raises(Stuck, match="one, two"):
        explore(program)


def test_the_host_does_everything_at_once() -> None:
    streams = streams_of(torch.device("cpu"))
    done: list[int] = []
    for stream in (streams.reducing, streams.fetching, streams.current()):
        assert type(stream) is Stream
        stream.wait(stream.record())
        stream.run(lambda: done.append(1))
    assert done == [1, 1, 1] and streams.current().empty(3, torch.float64).dtype is torch.float64


class _Recorder:
    """Stands in for a torch.Stream, of which there is none without an accelerator."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __enter__(self) -> None:
        self.calls.append("enter")

    def __exit__(self, *_: object) -> None:
        self.calls.append("exit")

    def record_event(self) -> str:
        self.calls.append("record")
        return "event"

    def wait_event(self, event: str) -> None:
        self.calls.append(("wait", event))


def test_a_device_stream_is_torchs() -> None:
    for name in ("record_event", "wait_event", "__enter__", "__exit__", "device"):
        assert name in dir(torch.Stream)
    torchs = _Recorder()
    stream = DeviceStream(torchs)  # type: ignore[arg-type]
    stream.run(lambda: torchs.calls.append("work"))
    stream.wait(stream.record())
    assert torchs.calls == ["enter", "work", "exit", "record", ("wait", "event")]
    assert stream.empty(4, torch.bfloat16).device.type == "meta" and torchs.calls[-2:] == ["enter", "exit"]


def test_the_example_shows_the_race_and_its_end() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "examples/stream_race.py"], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("a wrong one") == 3 and "nan" in done.stdout
    assert "with every wait: no race in any of" in done.stdout
