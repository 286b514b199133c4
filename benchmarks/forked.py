"""Many ranks on one machine: forked from one process that has imported torch, so that they share its memory."""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Task = Callable[[int, int], Any]  # of a rank and the world


class RanksFailed(RuntimeError):
    """What the first few of them said."""


class _Group(NamedTuple):
    store: str
    world: int
    limit: float


def _rank(rank: int, group: _Group, task: Task, answer: Connection) -> None:
    faulthandler.dump_traceback_later(group.limit, exit=True)
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=group.limit)
        where = f"file://{group.store}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=group.world, timeout=limit)
        found = task(rank, group.world)
        dist.barrier()
        answer.send((True, found))
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
        raise


def play(world: int, limit: float, task: Task) -> list[Any]:
    """What every rank answers within `limit` seconds. Nobody is left behind."""
    fork = multiprocessing.get_context("fork")
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(str(Path(folder, "store")), world, limit)
        try:
            for rank in range(world):
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_rank, args=(rank, group, task, theirs))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            answers = [pipe.recv() if pipe.poll(limit) else (False, "no answer in time") for pipe in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
                process.join()
    wrong = [f"rank {rank}: {said}" for rank, (good, said) in enumerate(answers) if not good]
    if wrong:
        raise RanksFailed("\n".join(wrong[:3]))
    return [said for _, said in answers]
