"""Leaving: a rank that has finished serves those that have not; one that fails tells at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from retrograde.transport.collective.communicator import Communicator, Offer
from tests.endings import run_to_the_end
from tests.harness import WORKER_ENVIRONMENT
from tests.small import batch, build, loss_of
from tests.stages import WITH_OTHERS

pytestmark = pytest.mark.timeout(120)
LATE = 1.5  # seconds: long after the others have finished


# ---- ranks that finish
def _saves_late(rank: int, world: int, how: str, path: str) -> None:
    """Rank 0 reads the model when the others have finished."""
    model = build()
    rg.shard(model, 3, timeout=30.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    if rank == 0:
        time.sleep(LATE)
        torch.save(model.state_dict(), path)
    if how == "destroy_process_group":
        dist.destroy_process_group()
        del model, optimizer


@pytest.mark.parametrize("how", ("the end of the program", "destroy_process_group"))
@WITH_OTHERS
def test_ranks_that_have_finished_serve_the_others(how: str, world: int, tmp_path: Path) -> None:
    endings = run_to_the_end(_saves_late, world, how, str(tmp_path / "model.pt"))
    assert [ending.code for ending in endings] == [0] * world, endings
    assert [ending.stderr for ending in endings] == [""] * world
    saved = torch.load(tmp_path / "model.pt")
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in build().state_dict().items()
    }


def _groups_in_another_order(rank: int, world: int) -> None:
    """Two groups with engines, destroyed one by one in different orders, and the rest at once."""
    groups = [dist.new_group() for _ in range(3)]
    models = [build() for _ in groups]
    for model, group in zip(models, groups, strict=True):
        rg.shard(model, 3, process_group=group, timeout=20.0)
    loss_of(models[2], batch(rank)).backward()
    if rank == 0:
        models[2].state_dict()
    dist.destroy_process_group(groups[0])
    dist.destroy_process_group()


def test_several_groups(tmp_path: Path) -> None:
    endings = run_to_the_end(_groups_in_another_order, 2)
    assert [(ending.code, ending.stderr) for ending in endings] == [(0, "")] * 2


def _shutdowns_end_communicators() -> set[dist.ProcessGroup]:
    """As in NCCL: a group that has been shut down carries no more calls. Returns those that have been."""
    ended: set[dist.ProcessGroup] = set()
    issue = Communicator.issue

    def issue_if_open(self: Communicator, offer: Offer) -> list[dist.Work]:
        if self._own.group in ended:
            raise RuntimeError("the communicator has ended")
        return issue(self, offer)

    dist.ProcessGroup.shutdown = ended.add  # type: ignore[method-assign, assignment]
    Communicator.issue = issue_if_open  # type: ignore[method-assign]
    return ended


def _evaluates_late(rank: int, world: int) -> None:
    """By collectives, which ranks have foreseen; the others take part in them in destroy_process_group()."""
    ended = _shutdowns_end_communicators()
    model = build()
    engine = rg.shard(model, 3, transport="collective", timeout=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    if rank == 0:
        time.sleep(LATE)
        with torch.no_grad():
            assert torch.equal(model(batch(0)), build()(batch(0)))
    own = engine.transport._communicator._owners._own.group  # type: ignore[union-attr]
    dist.destroy_process_group()
    assert own in ended


@WITH_OTHERS
def test_ranks_that_have_finished_take_part_in_the_others_calls(world: int) -> None:
    endings = run_to_the_end(_evaluates_late, world)
    assert [(ending.code, ending.said, ending.stderr) for ending in endings] == [(0, "", "")] * world


def _one_stays(rank: int, world: int) -> None:
    """Rank 1 does not end, and asks for nothing."""
    model = build()
    rg.shard(model, 3, timeout=1.0)
    if rank == 1:
        time.sleep(8.0)
        os._exit(0)


def test_a_rank_that_stays_is_waited_for_no_longer_than_the_timeout() -> None:
    start = time.monotonic()
    first, _, third = run_to_the_end(_one_stays, 3)
    for rank, ending in ((0, first), (2, third)):
        assert ending.code == 0
        assert ending.stderr == (
            f"retrograde: rank {rank} has finished and waited 1 s for rank(s) 1, which neither finished nor asked for "
            f"anything; it leaves now. A rank that goes on needs the others: raise shard(timeout=...)\n"
        )
    assert time.monotonic() - start < 40.0


def _reads_long(rank: int, world: int) -> None:
    """Longer than the time-out in all, never as long without asking for something."""
    model = build()
    rg.shard(model, 3, timeout=2.0)
    if rank == 0:
        for _ in range(10):
            time.sleep(0.5)
            model.state_dict()


def test_a_rank_that_goes_on_reading_is_served_beyond_the_timeout() -> None:
    endings = run_to_the_end(_reads_long, 2)
    assert [(ending.code, ending.stderr) for ending in endings] == [(0, "")] * 2


# ---- unequal numbers of batches
def _unequal(rank: int, world: int, barrier: bool) -> None:
    model = build()
    rg.shard(model, 3, timeout=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 + rank):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    if barrier:
        dist.barrier()


def test_ranks_with_more_batches_are_told_at_once() -> None:
    start = time.monotonic()
    first, second = run_to_the_end(_unequal, 2, False)
    said = second.said.removeprefix("retrograde.errors.DivergenceError: ")
    assert said == (
        "rank 1 is at the end of a backward (backward 1 since the last step) and needs rank(s) 0, which finished: "
        "their programs have ended, or called dist.destroy_process_group(). Let every rank come to the same steps, "
        "also one that has no more data: it may step without a backward"
    )
    assert second.code == 1 and first.code == 0
    assert first.stderr == f"retrograde: rank 0 had finished when something went wrong: {said}\n"
    assert time.monotonic() - start < 30.0


def test_a_rank_in_a_barrier_says_what_it_was_told() -> None:
    """torch's own error names neither cause nor rank."""
    first, second = run_to_the_end(_unequal, 2, True)
    assert "DivergenceError: rank 1 waited 5 s for rank(s) 0 at the end of a backward" in second.said
    assert first.code == 1
    (line,) = [line for line in first.stderr.splitlines() if line.startswith("retrograde: ")]
    assert line.startswith(
        "retrograde: rank 0 was told before it ended: rank 1 waited 5 s for rank(s) 0 at the end of "
    )


# ---- ranks that fail
FAILURES = {
    "an exception": "rank 1 ended with ValueError: a mistake",
    "sys.exit": "rank 1 ended with exit status 4",
    "an exception, and a clean-up": "rank 1 ended with ValueError: a mistake",
}


def _fails(rank: int, world: int, how: str) -> None:
    model = build()
    rg.shard(model, 3, timeout=60.0)
    if rank == 1:
        try:
            if how == "sys.exit":
                sys.exit(4)
            raise ValueError("a mistake")
        finally:
            if "clean-up" in how:
                dist.destroy_process_group()
    time.sleep(LATE)
    model.state_dict()


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_does_not_wait_and_says_why(how: str) -> None:
    start = time.monotonic()
    first, second, third = run_to_the_end(_fails, 3, how, timeout=50.0)
    for rank, ending in ((0, first), (2, third)):
        assert ending.code == 1
        assert ending.said == f"retrograde.errors.DivergenceError: rank {rank}: {FAILURES[how]}"
    assert second.code == (4 if how == "sys.exit" else 1)
    assert time.monotonic() - start < 40.0, "less than the engine's own time-out"


# ---- programs of their own
README = Path(__file__).parents[2] / "README.md"
PROGRAM = """
import sys, time, torch, torch.distributed as dist
import retrograde as rg
from tests.small import batch, build, loss_of

def main():
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
    model = build()
    rg.shard(model, 3, timeout=20.0)
    {body}

main()
"""


def _programs(body: str, folder: Path) -> list[tuple[int, str, str]]:
    """Two ranks as programs: exit code, stdout and stderr of each. Not by tests/processes.py: the test is about how
    Python itself starts and ends them."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    program = PROGRAM.format(body=body.replace("\n", "\n    "))
    meeting = f"file://{folder / 'store'}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_a_program_that_ends_serves_the_other(tmp_path: Path) -> None:
    body = f"if rank == 0:\n    time.sleep({LATE})\n    print(len(model.state_dict()))"
    first, second = _programs(body, tmp_path)
    assert first == (0, f"{len(build().state_dict())}\n", "")
    assert second == (0, "", "")


def test_a_program_that_raises_does_not_wait(tmp_path: Path) -> None:
    body = f"if rank == 1:\n    raise ValueError('a mistake')\ntime.sleep({LATE})\nmodel.state_dict()"
    first, second = _programs(body, tmp_path)
    assert first[0] == 1 and "DivergenceError: rank 0: rank 1 ended with ValueError: a mistake" in first[2]
    assert second[0] == 1 and second[2].endswith("ValueError: a mistake\n")


def test_the_readme_needs_no_barrier() -> None:
    (example,) = re.findall(r"```python\n(import torch, .*?)```", README.read_text(), re.S)
    assert "state_dict()" in example and "barrier" not in example


# ---- use after it
def _uses_it_after(rank: int, world: int) -> None:
    model = build()
    rg.shard(model, 3, timeout=5.0)
    dist.destroy_process_group()
    model.state_dict()


def test_use_after_the_group_has_ended() -> None:
    for rank, ending in enumerate(run_to_the_end(_uses_it_after, 2)):
        assert ending.said == (
            f"retrograde.errors.DivergenceError: rank {rank}: all ranks have left this process group "
            f"(dist.destroy_process_group(), or the end of the program), so other ranks' shards cannot be read any more"
        )


def _children(rank: int, world: int) -> None:
    """A process that was forked ends as Python ends, and its parent goes on."""
    model = build()
    rg.shard(model, 3, timeout=10.0)
    for code in (0, 1):
        child = os.fork()
        if child == 0:
            sys.exit(code)
        os.waitpid(child, 0)
    model.state_dict()
    loss_of(model, batch(rank)).backward()


def test_forked_processes_leave_their_parents_connections_alone() -> None:
    for ending in run_to_the_end(_children, 2):
        assert ending.code == 0, ending
