"""When one rank dies, all others name that rank, whoever else leaves because of it."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time

import pytest
import torch

import retrograde as rg
from tests.endings import Ending, run_to_the_end
from tests.small import batch, build, loss_of

WORLD = 5
DEATHS = {
    "os._exit": (lambda: os._exit(3), 3),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -9),
    "an exception": (lambda: _raise(), 1),
    "sys.exit": (lambda: sys.exit(3), 3),
}


def _raise() -> None:
    raise ValueError("a mistake of this rank's own")


def _trains_until_one_dies(rank: int, world: int, how: str, seed: int, transport: str) -> None:
    """Ranks at their own pace, so that some notice the death late, when others have already left because of it."""
    chance = random.Random(f"{seed} {rank}")
    victim, last = seed % world, random.Random(seed).randrange(1, 4)
    model = build()
    rg.shard(model, 1 + seed % 3, timeout=20.0, transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        time.sleep(chance.random() * 0.05)
        loss = loss_of(model, batch(rank, step))
        if rank == victim and step == last and seed % 2:
            DEATHS[how][0]()
        loss.backward()
        if rank == victim and step == last:
            DEATHS[how][0]()
        if rank != victim and step == last:
            time.sleep(chance.choice((0.0, 0.0, 0.5, 1.0)))
        optimizer.step()
        optimizer.zero_grad()


def _named(rank: int, ending: Ending) -> set[str]:
    """The ranks that a survivor's error names."""
    start = f"retrograde.errors.DivergenceError: rank {rank}: "
    assert ending.said.startswith(start), ending
    return set(re.findall(r"rank (\d+)", ending.said.removeprefix(start)))


@pytest.mark.parametrize("how", DEATHS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", ("auto", "collective"))
@pytest.mark.timeout(120)
def test_survivors_name_the_rank_that_died(how: str, seed: int, transport: str) -> None:
    victim = seed % WORLD
    endings = run_to_the_end(_trains_until_one_dies, WORLD, how, seed, transport, timeout=50.0)
    assert endings[victim].code == DEATHS[how][1], endings[victim]
    for rank, ending in enumerate(endings):
        if rank != victim:
            assert ending.code == 1, ending
            assert _named(rank, ending) == {str(victim)}, f"rank {rank}: {ending.said}"
