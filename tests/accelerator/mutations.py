"""Every wait and event of the engine, left out in turn: `python -m tests.accelerator.mutations`.

A *site* is a line of the engine that waits for an event (`wait`), records one (`record`), waits for a call of a process
group (`call`), or makes the host wait for what it reads (`to_host`). Leaving it out must show in some scene: as a race,
or as another number. `tests/streams` does the same for every order of the simulated device.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.harness import WORKER_ENVIRONMENT, Pools, RankError, RankPool

if __name__ == "__main__":
    os.environ.update(WORKER_ENVIRONMENT)  # before torch, as tests/patterns/table.py does

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from retrograde.devices.streams import HAPPENED, DeviceStream
from retrograde.transport.collective.communicator import DeviceCall
from tests.accelerator import build as building
from tests.accelerator import device
from tests.accelerator.ranks import LateSeat
from tests.accelerator.training import build
from tests.patterns.models import SPECS

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
OF_PIPELINES = "pipelines: test_pipelines.py leaves out what the channel may not forget"

# Sites that may be left out without anything to be seen here, by file and code, and why they are there.
NOT_SHOWN: dict[tuple[str, str], str] = {
    ("communicator.py", "work.wait(offer.stream)"): AT_ONCE,
    (
        "communicator.py",
        "self._behind = offer.stream.record()  # the call begins when what was issued before it is done",
    ): "it orders nothing: the watch asks whether the device has come to the call",
    ("bucket.py", "self._producers.append(_Producer(stream, stream.record(), frozenset(mine)))"): IN_EVERY_ORDER,
    ("bucket.py", "stream.wait(other.event)"): IN_EVERY_ORDER,
    ("bucket.py", "stream.wait(producer.event)"): IN_EVERY_ORDER,
    ("pool.py", "return Loan(buffer, stream.record())"): IN_EVERY_ORDER,
    ("streams.py", "self.reducing.wait(current.record())  # what had the memory before"): IN_EVERY_ORDER,
    ("fences.py", "self._written = current.record()  # what undoes it is there"): BY_THE_HOST,
    (
        "fences.py",
        "current.wait(self._streams.serving.record())  # what others read of it has been read",
    ): BY_THE_HOST,
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
    ("staged.py", "return self._streams.current().to_host(value) if where[-1] else value"): BY_THE_HOST,
    ("staged.py", "self.work.wait(stream)"): ON_THE_HOST,
    ("strategy.py", "sending.work.wait(stream)"): ON_THE_HOST,
    ("strategy.py", "work.wait(stream)"): ON_THE_HOST,
    ("transport.py", "parts = incoming.wait(self._streams.current())"): OF_PIPELINES,
    ("device_channel.py", "made = self._streams.current().record()"): OF_PIPELINES,
    ("device_channel.py", "received.wait(stream)"): OF_PIPELINES,
    ("lanes.py", "return Received(tensors, self._stream.record())"): OF_PIPELINES,
    ("lanes.py", "self._stream.wait(made)"): OF_PIPELINES,
    ("lanes.py", "stream.wait(self._there)"): OF_PIPELINES,
    ("ties.py", "current.wait(self._streams.reducing.record())"): OF_PIPELINES,
    (
        "ties.py",
        "self._transport.put(result, {other: [total] for other in others}).wait(self._streams.current())",
    ): OF_PIPELINES,
    ("ties.py", "work.wait(self._streams.current())"): OF_PIPELINES,
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
    call = DeviceCall.wait

    def hasty(stream: DeviceStream, tensor: Tensor) -> Tensor:
        return to_host(stream, tensor) if watch.obeys("to_host") else _unsynchronised(stream, tensor)

    patches = {
        (DeviceStream, "record"): lambda stream: record(stream) if watch.obeys("record") else HAPPENED,
        (DeviceStream, "wait"): lambda stream, event: wait(stream, event) if watch.obeys("wait") else None,
        (DeviceStream, "to_host"): hasty,
        (DeviceCall, "wait"): lambda work, stream: call(work, stream) if watch.obeys("call") else None,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), patch in patches.items():
            stack.enter_context(mock.patch.object(owner, name, patch))
        yield watch


def _unsynchronised(stream: DeviceStream, tensor: Tensor) -> Tensor:
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    stream.run(lambda: copied.copy_(tensor, non_blocking=True))
    return copied


# ---- programs
class _Scene:
    """A sharded model, and what is seen of it in the end."""

    def __init__(self, rank: int, name: str = "mlp", timeout: float = 20.0, **options: Any) -> None:
        self.rank = rank
        self.where = device.of_rank(rank)
        self.spec = SPECS[name]
        self.model = build(name, self.where)
        self.engine = rg.shard(self.model, timeout=timeout, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.values: list[Tensor] = []

    def loss(self, step: int) -> Tensor:
        x, y = (tensor.pin_memory().to(self.where, non_blocking=True) for tensor in self.spec.batch(self.rank, step))
        return self.spec.loss(self.model(x), y)

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.values.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def edit(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.5)

    def halve_gradients(self) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)

    def linears(self) -> list[nn.Linear]:
        return [module for module in self.model.modules() if isinstance(module, nn.Linear)]

    def seen(self) -> list[Tensor]:
        weights = [param.full_tensor() for param in self.model.parameters()]  # type: ignore[attr-defined]
        return [value.detach().cpu() for value in (*self.values, *weights)]


def steps(rank: int, **options: Any) -> list[Tensor]:
    scene = _Scene(rank, "gpt", **options)
    for number in range(3):
        scene.step(number)
    return scene.seen()


def changed(rank: int, **options: Any) -> list[Tensor]:
    """Gradients are used between backward and step."""
    scene = _Scene(rank, **options)
    for number in range(2):
        scene.loss(number).backward()
        scene.halve_gradients()
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


def twice(rank: int, **options: Any) -> list[Tensor]:
    """Two backwards, with nothing that waits between them."""
    scene = _Scene(rank, **options)
    for number in range(2):
        for part in range(2):
            scene.loss(2 * number + part).backward()
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


def two_streams(rank: int, **options: Any) -> list[Tensor]:
    """Backwards on three streams add to the same gradients; only before the step are they ordered by the program."""
    scene = _Scene(rank, **options)
    scene.step(0)
    sides = [torch.Stream(scene.where) for _ in range(2)]
    main = torch.accelerator.current_stream(scene.where)
    for side in sides:
        side.wait_stream(main)
    with scene.engine.no_sync():
        for number, side in enumerate(sides):
            with side:
                scene.loss(number).backward()
    scene.loss(3).backward()
    for side in sides:
        main.wait_stream(side)
    scene.optimizer.step()
    scene.optimizer.zero_grad()
    scene.step(4)
    return scene.seen()


def window(rank: int, **options: Any) -> list[Tensor]:
    """More gradients wait than the pool keeps buffers for."""
    scene = _Scene(rank, "gpt", units=nn.Linear, **options)
    scene.step(0)
    with scene.engine.no_sync():
        for number in range(2):
            scene.loss(number).backward()
    scene.step(3)
    return scene.seen()


def edits(rank: int, **options: Any) -> list[Tensor]:
    """Reads between edits, on ranks of which one is ahead of the other, and a page that is held over a step."""
    scene = _Scene(rank, **options)
    scene.step(0)
    held = scene.linears()[0].weight
    scene.step(1)
    scene.values.append(held.detach().sum())
    for _ in range(2):
        scene.edit()
        scene.values.append(scene.loss(2).detach())
    with torch.no_grad():
        scene.linears()[-1].weight.add_(1.0)  # a full tensor, of which a part goes into the shard
    scene.values.append(scene.loss(3).detach())
    scene.step(4)
    return scene.seen()


def given_up(rank: int, **options: Any) -> list[Tensor]:
    """A backward raises on every rank after the first gradients were sent."""
    scene = _Scene(rank, **options)
    loss = scene.loss(0)

    def refuse(grad: Tensor) -> None:
        raise ValueError("given up")

    first = scene.linears()[0]
    handle = first.register_full_backward_hook(lambda module, grads, outputs: refuse(outputs[0]))
    with contextlib.suppress(ValueError):
        scene.loss(1).backward()
    handle.remove()
    del loss
    scene.optimizer.zero_grad()
    scene.step(2)
    return scene.seen()


def masters(rank: int, **options: Any) -> list[Tensor]:
    scene = _Scene(rank, precision="bf16", **options)
    scene.step(0)
    scene.values += [value.float() for value in scene.model.state_dict().values()]
    scene.step(1)
    return scene.seen()


def stray(rank: int, **options: Any) -> list[Tensor]:
    """Rank 1 evaluates alone, and is OUT until the step; then rank 0 does, while rank 1 waits for it elsewhere."""
    scene = _Scene(rank, timeout=6.0, **options)
    for number in range(3):
        scene.step(number)
    for alone in (1, 0):
        if rank == alone:
            with torch.no_grad():
                scene.values.append(scene.loss(7))
        if alone == 0:
            dist.barrier()
        scene.step(3 + alone)
    scene.step(5)
    return scene.seen()


def captured(rank: int, **options: Any) -> list[Tensor]:
    """What one rank captures the other adds to `.grad`."""
    scene = _Scene(rank, **options)
    scene.step(0)
    params = [param for param in scene.model.parameters() if param.requires_grad]
    if rank == 0:
        scene.values += [grad.local for grad in torch.autograd.grad(scene.loss(1), params)]  # type: ignore[attr-defined]
    else:
        scene.loss(1).backward()
    scene.halve_gradients()
    scene.optimizer.step()
    scene.optimizer.zero_grad()
    return scene.seen()


Scene = Callable[..., list[Tensor]]
SCENES: dict[str, tuple[Scene, dict[str, Any]]] = {
    "collective": (steps, {"transport": "collective", "exact": True}),
    "collective, backend's order": (steps, {"transport": "collective", "exact": False}),
    "one-sided": (steps, {"transport": "one-sided", "exact": True}),
    "gradients changed, one-sided": (changed, {"transport": "one-sided", "exact": True}),
    "no overlap": (two_streams, {"transport": "collective", "overlap": False}),
    "no overlap, one-sided": (two_streams, {"transport": "one-sided", "exact": True, "overlap": False}),
    "two streams": (two_streams, {"transport": "collective", "exact": True}),
    "two streams, one-sided": (two_streams, {"transport": "one-sided", "exact": True}),
    "window": (window, {"transport": "collective", "stage": 2}),
    "edits": (edits, {"transport": "collective"}),
    "edits, one-sided": (edits, {"transport": "one-sided", "exact": True}),
    "given up": (given_up, {"transport": "collective", "exact": True}),
    "given up, one-sided": (given_up, {"transport": "one-sided", "exact": True}),
    "masters": (masters, {"transport": "one-sided", "exact": True}),
    "offload of the optimizer": (steps, {"transport": "collective", "offload": "optimizer"}),
    "offload of parameters": (steps, {"transport": "collective", "offload": "parameters"}),
    "offload, one-sided": (edits, {"transport": "one-sided", "exact": True, "offload": "optimizer"}),
    "offload, two backwards": (twice, {"transport": "collective", "offload": "optimizer"}),
    "captured": (captured, {"transport": "one-sided", "exact": True}),
    "stray": (stray, {"transport": "collective", "exact": True}),
    "stray, backend's order": (stray, {"transport": "collective", "exact": False}),
}


def play(rank: int, world: int, scene: str, without: Site | None) -> Outcome:
    """A task for the pool."""
    want = _with_every_wait(rank, scene)
    watch, got, races = _played(rank, scene, without)
    same = len(got) == len(want) and all(map(torch.equal, got, want))
    return Outcome(frozenset(watch.seen), tuple(races), not same)


def _played(rank: int, scene: str, without: Site | None) -> tuple[_Watch, list[Tensor], list[str]]:
    run, options = SCENES[scene]
    torch.manual_seed(0)
    with device.use("lazy"), watched(without) as watch:
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
                wanted = {"wait": 1, "record": 0, "to_host": 1}.get(node.func.attr)
                if wanted == len(node.args):
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
    print(f"{len(missed)} of {len(chosen)} sites can be left out for no reason that is known")
    return 1 if missed or unvisited != set(UNVISITED) else 0


if __name__ == "__main__":
    sys.exit(main())
