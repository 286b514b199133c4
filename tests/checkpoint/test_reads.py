"""Loading reads what a rank needs and nothing else, straight into its place: bytes are counted, memory is asserted."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.checkpoint.marker import BLOCK
from retrograde.checkpoint.reading import BUFFER, CheckedFile
from tests.harness import Ranks
from tests.live import live_bytes

WIDTH, LAYERS = 1536, 2  # 9 MiB each: more than a buffer, many blocks


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _save(path: Path) -> nn.Module:
    model = build(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    rg.save(path, model, optimizer)
    return model


class Watch:
    """Notes every read: its bytes, and what is alive at that moment."""

    def __init__(self) -> None:
        self.checked = 0
        self.read = 0
        self.largest = 0
        self.peak = 0
        self.checking = False
        self._check = CheckedFile._check_block
        self._read = CheckedFile.read_into

    def __enter__(self) -> Watch:
        watch = self

        def check(file: CheckedFile, block: int, expected: int) -> None:
            watch.checking = True
            watch._check(file, block, expected)
            watch.checking = False

        def read(file: CheckedFile, start: int, memory: memoryview) -> None:
            if watch.checking:
                watch.checked += len(memory)
            elif len(memory) > 4096:  # else it is a description or a counter
                watch.read += len(memory)
                watch.peak = max(watch.peak, live_bytes())
            watch.largest = max(watch.largest, len(memory))
            watch._read(file, start, memory)

        CheckedFile._check_block = check
        CheckedFile.read_into = read
        return self

    def __exit__(self, *failure: object) -> None:
        CheckedFile._check_block = self._check
        CheckedFile.read_into = self._read


def _loaded(rank: int, world: int, path: str) -> list[torch.Tensor]:
    model = build(5)
    rg.shard(model, 3, units=nn.Linear)
    mine = sum(param.local.nbytes for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for states in (0, 1, 1):  # weights alone; with a state that is not there yet; with one that is
        before = live_bytes()
        with Watch() as watch:
            rg.load(path, model, optimizer if states else None)
        needed = mine * (1 + states)
        bias = WIDTH * 4
        assert needed - 2 * bias <= watch.read <= needed
        assert needed <= watch.checked <= needed + (1 + states) * (2 * LAYERS + 1) * BLOCK
        assert watch.largest <= BUFFER
        new = mine if states and before < 2 * mine else 0
        assert watch.peak <= before + new, (states, watch.peak - before, new, mine)
    dist.barrier()
    return [param.full_tensor().detach() for param in model.parameters()]


def test_a_rank_reads_what_it_needs(ranks: Ranks, tmp_path: Path) -> None:
    saved = _save(tmp_path / "checkpoint")
    for found in ranks(2).run(_loaded, str(tmp_path / "checkpoint")):
        assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), found, strict=True))
