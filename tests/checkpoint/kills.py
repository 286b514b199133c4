"""Kills during saves: whenever ranks are killed, the last good checkpoint is loaded, with the values it should have.

    python -m tests.checkpoint.kills --count 200

Two ranks do nothing but save, to one path or to numbered ones, some in the background. At a random moment one of them
or both are killed (SIGKILL). Then a plain model loads what is there. Values follow from the step that was saved, so a
mixture of two steps is found; and the step is never one before the last that was seen complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.processes import Processes, Seat

WORLD = 2
LIMIT = 60.0  # seconds, until the ranks of a round have begun to save
LONGEST = 0.4  # seconds, from there to the kill


@dataclass
class Outcome:
    kills: int = 0
    interrupted: int = 0  # saves that had begun and were not complete
    saved: int = 0  # checkpoints that were complete
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        seen = f"{self.kills} kills, {self.interrupted} of them left a save that had begun; {self.saved} saves complete"
        return "\n".join([f"{seen}; {len(self.faults)} faults", *self.faults])


def model_at(step: int, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    import retrograde as rg

    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    if sharded:
        rg.shard(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    model(torch.zeros(1, 96)).sum().backward()
    optimizer.step()  # there is a momentum
    optimizer.zero_grad()
    set_values(model, optimizer, step)
    return model, optimizer


def values(param: Tensor, step: int) -> Tensor:
    return torch.arange(param.numel(), dtype=torch.float32).view(param.shape) * 2**-10 + step


@torch.no_grad()
def set_values(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in model.parameters():
        param.copy_(values(param, step))
        optimizer.state[param]["momentum_buffer"].copy_(values(param, step + 1))


def wrong_values(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    found = []
    for name, param in model.named_parameters():
        if not torch.equal(param, values(param, step)):
            found.append(name)
        if not torch.equal(optimizer.state[param]["momentum_buffer"], values(param, step + 1)):
            found.append(f"momentum of {name}")
    return found


def save(path: Path, numbered: bool, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import retrograde as rg

    where = path / f"step-{step}" if numbered else path / "last"
    keep = 2 if numbered else None
    rg.save(where, model, optimizer, extra={"step": step}, keep=keep, async_=step % 3 == 0)


def _save_forever(seat: Seat, path: Path, numbered: bool, first: int, pipe: Connection) -> None:
    seat.join(30.0)
    model, optimizer = model_at(first, sharded=True)
    step = first
    pipe.send(None)
    with contextlib.suppress(Exception):  # the other rank was killed: this one will be
        while True:
            step += 1
            set_values(model, optimizer, step)
            save(path, numbered, step, model, optimizer)
    time.sleep(LIMIT)


def _kill_during_saves(path: Path, numbered: bool, first: int, chance: random.Random) -> None:
    processes = Processes(WORLD)
    try:
        ours, started = [], []
        for seat in processes.seats:
            mine, theirs = processes.pipe()
            started.append(processes.start(seat, _save_forever, path, numbered, first, theirs))
            ours.append(mine)
        for pipe in ours:
            if not pipe.poll(LIMIT):
                raise RuntimeError("ranks did not begin to save")
            pipe.recv()
        time.sleep(chance.uniform(0.0, LONGEST))
        if chance.random() < 0.5:  # one alone; the other may finish what it does
            os.kill(started[chance.randrange(WORLD)].pid, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.05))
    finally:
        processes.end()


def _loaded_step(path: Path) -> tuple[int, list[str]]:
    """What a plain model gets, and what of it is not what it should be."""
    import retrograde as rg

    model, optimizer = model_at(-1)
    loaded = rg.load(path, model, optimizer)
    step = loaded.extra["step"]
    return step, wrong_values(model, optimizer, step)


def run(count: int, seed: int, folder: Path) -> Outcome:
    chance = random.Random(seed)
    outcome = Outcome()
    steps = {True: 0, False: 0}
    for numbered in steps:
        save(folder / str(numbered), numbered, 0, *model_at(0))
    for number in range(count):
        numbered = number % 2 == 1
        path = folder / str(numbered)
        _kill_during_saves(path, numbered, steps[numbered], chance)
        outcome.kills += 1
        outcome.interrupted += any(path.glob(".*.saving"))
        try:
            step, wrong = _loaded_step(path)
        except Exception as error:
            outcome.faults.append(f"kill {number}: not loaded: {error}")
            return outcome
        if wrong:
            outcome.faults.append(f"kill {number}: step {step}: wrong values of {', '.join(wrong)}")
        if step < steps[numbered]:
            outcome.faults.append(f"kill {number}: step {step}, after {steps[numbered]} was complete")
        outcome.saved += step - steps[numbered]
        steps[numbered] = step
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        outcome = run(arguments.count, arguments.seed, Path(folder))
    print(outcome)
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
