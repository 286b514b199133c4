"""The two walks through the house, from a trace of a real run: python tools/walks.py

One step of a small model on two ranks, which are threads of this process. Rank 0's calls are recorded while
`module.weight` is read for the first time after a step, and while a backward brings its gradient to `.grad`. A *hop* is
a call from one room of src/retrograde into another, or from the user's code or autograd into a room. Each function is
listed once, where it was first entered. Rooms that serve all others (`SERVANTS`) are not walked through, and
constructors are not hops. docs/design/walks.md has the result; tests/unit/test_walks.py compares the two.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch._dynamo  # torch imports it with the first optimizer, and two threads that import it deadlock
from torch import nn

import retrograde
from retrograde.engine.shard import Options, shard_over
from retrograde.transport import ThreadRanks
from retrograde.transport.threads import ThreadGroup

SOURCE = Path(retrograde.__file__).parent
SERVANTS = {"torch_internals", "errors", "arguments", "ledger", "labels", "layout", "devices"}
HELPERS = {"alive"}  # follows a weak reference
OUTSIDE = "outside"
WORLD, PATIENCE = 2, 60.0


class Place(NamedTuple):
    file: str  # below src/retrograde
    function: str

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]

    def __str__(self) -> str:
        return f"`{self.file}` `{self.function}`" if self.file else OUTSIDE


NOWHERE = Place("", OUTSIDE)


class Hop(NamedTuple):
    caller: Place
    called: Place

    def __str__(self) -> str:
        return f"{self.caller} → {self.called}"


class Walks(NamedTuple):
    weight: list[Hop]
    gradient: list[Hop]


class Trace:
    """The hops of the thread that records, in the order in which they first came."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        called = _place(frame) if event == "call" else None
        if called is None or called.function in HELPERS or called.function.rpartition(".")[2].startswith(("__", "<")):
            return
        hop = Hop(_caller(frame), called)
        if hop.caller.room != called.room and called not in (known.called for known in self.hops):
            self.hops.append(hop)


def _place(frame: FrameType) -> Place | None:
    """Where a frame is, if it is in a room that is walked through."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(SOURCE):
        return None
    file = path.relative_to(SOURCE)
    if file.with_suffix("").parts[0] in SERVANTS:
        return None
    return Place(file.as_posix(), frame.f_code.co_qualname.replace(".<locals>", ""))


def _caller(frame: FrameType) -> Place:
    """The nearest place around a call, without what has no name of its own there."""
    around = frame.f_back
    while around is not None:
        place = _place(around)
        if place is not None:
            return Place(place.file, place.function.replace(".<lambda>", ""))
        around = around.f_back
    return NOWHERE


def walks() -> Walks:
    """Of rank 0, after a first step in which everything was made."""
    group = ThreadGroup(WORLD)
    all_have_stepped = threading.Barrier(WORLD)
    models = [nn.Linear(4, 3, bias=False) for _ in range(WORLD)]
    found: list[Walks] = []
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            walked = _step_and_walk(group.rank(number), models[number], all_have_stepped)
        except BaseException as error:
            errors.append(error)
        else:
            found.extend([walked] if number == 0 else [])

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    return found[0]


def _step_and_walk(ranks: ThreadRanks, model: nn.Linear, all_have_stepped: threading.Barrier) -> Walks:
    shard_over(ranks, model, Options(stage=3, timeout=PATIENCE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.full((2, 4), float(ranks.rank + 1))
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    all_have_stepped.wait(PATIENCE)  # else a shard may be served at once, or when its owner has stepped
    weight, gradient = Trace(), Trace()
    with weight.recording():
        full = model.weight
    loss = (inputs @ full.T).sum()
    del full
    with gradient.recording():
        loss.backward()
    return Walks(weight.hops, gradient.hops)


def main() -> None:
    for name, hops in walks()._asdict().items():
        print(f"{name}\n")
        for number, hop in enumerate(hops, 1):
            print(f"{number}. {hop}")
        print()


if __name__ == "__main__":
    main()
