"""Every wait and event of the engine, left out in turn: `python -m tests.accelerator.mutations`.

A *site* is a line of the engine that waits for an event (`wait`), records one (`record`), waits for a call of a process
group (`call`), makes the host wait for what it reads (`to_host`), or says that memory is in use on another stream than
its own (`hold`). Leaving it out must show in some scene (scenes.py): as a race, or as another number. `tests/streams`
does the same for every order of the simulated device.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import linecache
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.harness import WORKER_ENVIRONMENT, Pools, RankError, RankPool

if __name__ == "__main__":
    os.environ.update(WORKER_ENVIRONMENT)  # before torch, as tests/patterns/table.py does

import torch
import torch.distributed as dist
from torch import Tensor

import retrograde as rg
from retrograde.devices.streams import HAPPENED, DeviceStream
from retrograde.transport.collective.communicator import DeviceCall
from tests.accelerator import build as building
from tests.accelerator import device
from tests.accelerator.ranks import LateSeat
from tests.accelerator.scenes import SCENES

SOURCES = Path(rg.__file__).parent
WORLD = 2


class Site(NamedTuple):
    """A line of the engine, by what it says: numbers of lines change."""

    kind: str
    file: str
    code: str


class Outcome(NamedTuple):
    sites: frozenset[Site]  # that were come by
    races: tuple[str, ...]
    wrong: bool  # another number than with every wait

    @property
    def shown(self) -> bool:
        return bool(self.races) or self.wrong


IN_EVERY_ORDER = "tests/streams shows it, on the simulated device; here other waits come to the same"
BY_THE_HOST = "the host waits in the thread that serves, and the checker takes that for an order of all threads"
ON_THE_HOST = "memory of the host: nothing is on a stream"
COPIES = "it also copies: without it nothing arrives"
AT_ONCE = "what overlap=False asks for; the numbers need the later wait alone"
LOOKED_AT = "the host has just had the same bytes (`complete`), and mostly in the same memory"
OF_A_LANE = "it comes to the waits of a lane, which are sites of their own"

# Sites that may be left out without anything to be seen here, by file and code, and why they are there.
NOT_SHOWN: dict[tuple[str, str], str] = {
    ("communicator.py", "work.wait(offer.stream)"): AT_ONCE,
    (
        "communicator.py",
        "self._behind = offer.stream.record()  # the call begins when what was issued before it is done",
    ): "it orders nothing: the watch asks whether the device has come to the call",
    (
        "transport.py",
        "return parts_by_rank(self._streams.reducing.to_host(received), self._communicator.owners)",
    ): LOOKED_AT,
    (
        "courtesy.py",
        "courtesy.work.finish(self._stream)",
    ): "the host has seen that the call is done, and asks for its results only then",
    ("bucket.py", "stream.wait(other.event)"): IN_EVERY_ORDER,
    ("streams.py", "self.reducing.wait(current.record())  # what had the memory before"): IN_EVERY_ORDER,
    ("fences.py", "self._written = current.record()  # after the copy that can undo the edit"): BY_THE_HOST,
    (
        "fences.py",
        "current.wait(self._streams.serving.record())  # other ranks' reads of the piece come first",
    ): BY_THE_HOST,
    (
        "ties.py",
        "current.wait(self._streams.reducing.record())",
    ): "the host has waited for the copy from its own memory (from_host in transport/staged.py), and for nothing less",
    ("gathering.py", "fetching.wait(free)"): "as a page's, which is shown, where the scratch page was another stream's",
    (
        "gathering.py",
        "fetching.wait(current.record())  # a step may have written the shard there",
    ): "as a page's, which is shown; a fresh scratch page has an event that comes to the same",
    (
        "gathering.py",
        "self._pool.give(scratch, current.record())",
    ): "as a page's, which is shown, where another stream takes the scratch page next",
}

# Lines that no scene comes by, and why.
UNVISITED: dict[tuple[str, str], str] = {
    ("bucket.py", "producer.stream.wait(read)"): "gradients of 64 KiB and more; tests/streams shows it",
    ("bucket.py", "self.release(stream.record())"): "a bucket that nobody wants; tests/streams comes by",
    ("staged.py", "self.work.wait(stream)"): ON_THE_HOST,
    ("strategy.py", "sending.work.wait(stream)"): ON_THE_HOST,
    ("strategy.py", "work.wait(stream)"): ON_THE_HOST,
    ("transport.py", "parts = incoming.wait(self._streams.current())"): OF_A_LANE,
    ("device_channel.py", "received.wait(stream)"): OF_A_LANE,
    (
        "ties.py",
        "self._transport.put(result, {other: [total] for other in others}).wait(self._streams.current())",
    ): ON_THE_HOST,
    ("ties.py", "work.wait(self._streams.current())"): ON_THE_HOST,
    ("replicas.py", "self._first.finish(self._steps.stream)"): ON_THE_HOST,
    ("replicas.py", "super().finish(stream)"): ON_THE_HOST,
    ("transport.py", "work.wait(stream)"): ON_THE_HOST,
    ("unit.py", "self._coherence.read_masters(self, flat).wait(stream)"): COPIES,
}


# ---- leaving one out
class _Watch:
    def __init__(self, without: Site | None) -> None:
        self.without = without
        self.seen: set[Site] = set()

    def obeys(self, kind: str) -> bool:
        """Note the line that asks; is it to be done?"""
        frame = sys._getframe(2)
        path, line = frame.f_code.co_filename, frame.f_lineno
        site = Site(kind, Path(path).name, linecache.getline(path, line).strip())
        if path.startswith(str(SOURCES)):
            self.seen.add(site)
        return site != self.without


@contextlib.contextmanager
def watched(without: Site | None) -> Iterator[_Watch]:
    watch = _Watch(without)
    record, wait, to_host = DeviceStream.record, DeviceStream.wait, DeviceStream.to_host
    call, finish, hold = DeviceCall.wait, DeviceCall.finish, DeviceStream.hold

    def hasty(stream: DeviceStream, tensor: Tensor) -> Tensor:
        return to_host(stream, tensor) if watch.obeys("to_host") else _unsynchronised(stream, tensor)

    patches = {
        (DeviceStream, "record"): lambda stream: record(stream) if watch.obeys("record") else HAPPENED,
        (DeviceStream, "wait"): lambda stream, event: wait(stream, event) if watch.obeys("wait") else None,
        (DeviceStream, "to_host"): hasty,
        (DeviceStream, "hold"): lambda stream, tensor: hold(stream, tensor) if watch.obeys("hold") else None,
        (DeviceCall, "wait"): lambda work, stream: call(work, stream) if watch.obeys("call") else None,
        (DeviceCall, "finish"): lambda work, stream: finish(work, stream) if watch.obeys("call") else None,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), patch in patches.items():
            stack.enter_context(mock.patch.object(owner, name, patch))
        yield watch


def _unsynchronised(stream: DeviceStream, tensor: Tensor) -> Tensor:
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    stream.run(lambda: copied.copy_(tensor, non_blocking=True))
    return copied


# ---- scenes
def play(rank: int, world: int, scene: str, without: Site | None) -> Outcome:
    """A task for the pool."""
    want = _with_every_wait(rank, scene)
    watch, got, races = _played(rank, scene, without)
    same = len(got) == len(want) and all(map(torch.equal, got, want))
    return Outcome(frozenset(watch.seen), tuple(races), not same)


def _played(rank: int, scene: str, without: Site | None) -> tuple[_Watch, list[Tensor], list[str]]:
    run, options, mode = SCENES[scene]
    torch.manual_seed(0)
    with device.use(mode), watched(without) as watch:
        got = run(rank, **options)
        dist.barrier()
        torch.accelerator.synchronize()
        return watch, got, device.races()


@functools.cache
def _with_every_wait(rank: int, scene: str) -> list[Tensor]:
    _, values, races = _played(rank, scene, None)
    assert races == [], f"{scene}: {races}"
    assert values and all(bool(value.isfinite().all()) for value in values)
    return values


# ---- which there are
def sites_in(scene: str, pool: RankPool) -> frozenset[Site]:
    found: list[Outcome] = pool.run(play, scene, None, timeout=120.0)
    assert not any(outcome.shown for outcome in found), (scene, found)
    return frozenset().union(*(outcome.sites for outcome in found))


def sites_in_sources() -> set[Site]:
    """Calls of `wait` with one argument and of `record` with none, in files that know streams."""
    found = set()
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        knows = "retrograde.devices import" in text or ".streams" in text or path.name == "streams.py"
        if not knows or "simulated" in path.parts:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                wanted = {"wait": 1, "record": 0, "to_host": 1, "hold": 1, "finish": 1}.get(node.func.attr)
                if wanted == len(node.args) and not ast.unparse(node.func.value).endswith("ledger"):
                    found.add(Site(node.func.attr, path.name, text.splitlines()[node.lineno - 1].strip()))
    return found


def shown_by(site: Site, scenes: list[str], pool: RankPool) -> str | None:
    """What is seen first when it is left out."""
    for scene in scenes:
        try:
            outcomes: list[Outcome] = pool.run(play, scene, site, timeout=120.0)
        except RankError as error:  # who takes what has not come for somebody's absence waits in vain
            return f"{scene}: {str(error).strip().splitlines()[-1]}"
        for outcome in outcomes:
            if outcome.shown:
                return f"{scene}: {outcome.races[0] if outcome.races else 'another number'}"
    return None


def all_sites(pool: RankPool) -> dict[Site, list[str]]:
    found: dict[Site, list[str]] = {}
    for scene in SCENES:
        for site in sites_in(scene, pool):
            found.setdefault(site, []).append(scene)
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="which part of how many")
    first, every = parser.parse_args().part
    torch.set_num_threads(1)
    building.build()
    missed = []
    with contextlib.closing(Pools(LateSeat)) as pools:
        sites = all_sites(pools(WORLD))
        chosen = {site: scenes for site, scenes in sites.items() if zlib.crc32(repr(site).encode()) % every == first}
        for site, scenes in chosen.items():
            seen = shown_by(site, scenes, pools(WORLD))
            excused = NOT_SHOWN.get((site.file, site.code))
            print(f"{site.file}: {site.kind} of `{site.code}`: {seen or excused or 'NOT SEEN'}", flush=True)
            if seen is None and excused is None:
                missed.append(site)
    unvisited = {(site.file, site.code) for site in sites_in_sources()} - {(s.file, s.code) for s in sites}
    for name, code in sorted(unvisited - set(UNVISITED)):
        print(f"{name}: `{code}` is in no scene")
    for name, code in sorted(set(UNVISITED) - unvisited):
        print(f"{name}: `{code}` needs no reason for being in no scene")
    print(f"{len(missed)} of {len(chosen)} sites can be left out for no reason that is known")
    return 1 if missed or unvisited != set(UNVISITED) else 0


if __name__ == "__main__":
    sys.exit(main())
