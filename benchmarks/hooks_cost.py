"""`python -m benchmarks.hooks_cost`: what saved-tensor hooks cost.

Measured twice. *A step*: the GPT at world 1, plain, under hooks that do nothing, and sharded at stage 3,
taking turns in one process; the last also pays for everything else the engine does, so it is an upper
bound. *A saved tensor*: chains of tiny multiplications, where the hook is all there is to see.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.crew import ENVIRONMENT
from benchmarks.model import FULL, TINY, Batches, Workload, build
from benchmarks.report import Grid, wide_console
from benchmarks.stats import Spread

RESULTS = Path(__file__).parent / "results"
_LINKS = 2000  # multiplications in a chain
_ROUNDS = 15

Hooks = Callable[[], AbstractContextManager[object]]


def _empty_hooks() -> AbstractContextManager[object]:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@dataclass(frozen=True)
class Subject:
    """A way to run the model: the name, one training step."""

    name: str
    step: Callable[[], float]


def _subject(name: str, work: Workload, *, sharded: bool = False, hooks: Hooks = nullcontext) -> Subject:
    model = build(work)
    batches = Batches(work, rank=0)
    if sharded:
        import retrograde as rg

        rg.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, fused=True)

    def step() -> float:
        with hooks():
            loss = model(*batches.take())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Subject(name, step)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def step_costs(work: Workload, repeats: int, engine: bool) -> dict[str, list[float]]:
    """Seconds of each subject's steps; they take turns step by step, and start in another order each time."""
    subjects = [_subject("plain", work), _subject("empty hooks", work, hooks=_empty_hooks)]
    if engine:
        subjects.append(_subject("retrograde, stage 3", work, sharded=True))
    for subject in subjects:
        subject.step()
    taken: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for repeat in range(repeats):
        first = repeat % len(subjects)
        for subject in subjects[first:] + subjects[:first]:
            taken[subject.name].append(_seconds(subject.step))
    return taken


@dataclass(frozen=True)
class Saved:
    """How many tensors autograd saves in one forward of the model."""

    weights: int  # aliases of parameters: these become handles
    others: int


def saved_per_step(work: Workload) -> Saved:
    model = build(work)
    batches = Batches(work, rank=0)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    packed: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.untyped_storage().data_ptr() in parameters)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batches.take())
    return Saved(weights=sum(packed), others=len(packed) - sum(packed))


class Chain(nn.Module):
    """Multiplies by a constant (saved, not a weight) or by its weight (saved, and an alias of a page)."""

    def __init__(self, by_weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("constant", torch.ones(8))
        self.by_weight = by_weight

    def forward(self) -> Tensor:
        weight = self.weight  # once: the cost of an access is not what is measured
        factor = weight if self.by_weight else self.constant
        y = weight * 1.0
        for _ in range(_LINKS):
            y = y * factor
        return y.sum()


@dataclass(frozen=True)
class PerTensor:
    """Microseconds to pack and unpack one saved tensor."""

    weight: float
    other: float

    def milliseconds(self, saved: Saved) -> float:
        return (self.weight * saved.weights + self.other * saved.others) / 1e3


def per_tensor_costs(engine: bool) -> dict[str, PerTensor]:
    costs = {"empty hooks": _per_tensor(_empty_hooks)}
    if engine:
        costs["retrograde, stage 3"] = _per_tensor(nullcontext, sharded=True)
    return costs


def _per_tensor(hooks: Hooks, *, sharded: bool = False) -> PerTensor:
    other = _chain_cost(False, hooks, sharded=sharded)
    both = _chain_cost(True, hooks, sharded=sharded)  # a link saves the product, too
    return PerTensor(weight=1e6 * (both - other) / _LINKS, other=1e6 * other / _LINKS)


def _chain_cost(by_weight: bool, hooks: Hooks, *, sharded: bool = False) -> float:
    """Seconds a chain takes longer than a plain one. The least of many rounds: noise only ever adds."""
    plain = Chain(by_weight)
    watched = Chain(by_weight)
    if sharded:
        import retrograde as rg

        rg.shard(watched, stage=3)

    def watched_run() -> None:
        with hooks():
            loss = watched()
        loss.backward()

    pairs = [(_seconds(lambda: plain().backward()), _seconds(watched_run)) for _ in range(_ROUNDS)]
    return min(watched for _, watched in pairs) - min(plain for plain, _ in pairs)


@dataclass(frozen=True)
class Cost:
    plain_ms: float
    saved: Saved
    over_plain: dict[str, Spread]  # percent of a plain step
    per_tensor: dict[str, PerTensor]

    def estimate(self, name: str) -> float:
        """Percent of a step, from the cost of one tensor: free of the noise of whole steps."""
        return 100 * self.per_tensor[name].milliseconds(self.saved) / self.plain_ms


def measure(work: Workload, repeats: int, engine: bool) -> Cost:
    taken = step_costs(work, repeats, engine)
    plain = taken.pop("plain")
    over = {
        name: Spread.of([100 * (mine / theirs - 1) for mine, theirs in zip(seconds, plain, strict=True)])
        for name, seconds in taken.items()
    }
    return Cost(1e3 * Spread.of(plain).median, saved_per_step(work), over, per_tensor_costs(engine))


def grids(cost: Cost) -> list[Grid]:
    rows = []
    for name, over in cost.over_plain.items():
        each = cost.per_tensor[name]
        measured = f"{over.median:+.1f}% ({over.low:+.1f} to {over.high:+.1f})"
        hooks = f"{cost.estimate(name):.2f}%"
        rows.append((name, f"{each.weight:.2f}", f"{each.other:.2f}", hooks, measured))
    saved = f"{cost.saved.weights} weights and {cost.saved.others} other tensors"
    title = f"Saved-tensor hooks, world 1; a step of {cost.plain_ms:.0f} ms saves {saved}"
    columns = ("", "µs per weight", "µs per other", "hooks in a step", "whole step over plain")
    return [Grid(title, columns, rows)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hooks_cost", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="steps of each subject")
    parser.add_argument("--tiny", action="store_true", help="a very small model: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    console = wide_console()
    engine = importlib.util.find_spec("retrograde") is not None
    if not engine:
        console.print("retrograde is not installed: empty hooks only")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cost = measure(TINY if options.tiny else FULL, options.repeats, engine)
    finally:
        dist.destroy_process_group()
    for grid in grids(cost):
        console.print(grid.rich())
    stem = "tiny-hooks" if options.tiny else "latest-hooks"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{stem}.json").write_text(json.dumps(asdict(cost), indent=1) + "\n")
    (options.out / f"{stem}.md").write_text("\n\n".join(grid.markdown() for grid in grids(cost)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
