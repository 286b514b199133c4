"""Loading reads what a rank needs and nothing else, straight into its place: bytes are counted, memory is asserted."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import retrograde as rg
from benchmarks.live import Live
from retrograde.checkpoint.checksums import BLOCK
from retrograde.checkpoint.reading import BUFFER, CheckedFile
from retrograde.torch_internals import check_before_first_use
from tests.harness import Ranks
from tests.live import live_bytes
from tests.stages import WITH_OTHERS

WIDTH, LAYERS = 1536, 2  # 9 MiB each: more than a buffer, many blocks
FEW = 4096  # bytes of numbers that are no weights: a rank's messages, say


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


# ---- weights of others, into a model that has no memory yet
class Memory(Live):
    """All memory of tensors, but for views of the file: it is mapped, so they take none that is the rank's own."""

    def __init__(self, file: Path) -> None:
        super().__init__(peak=True)
        self._file = str(file)
        self.views = 0

    def watch(self, tensor: torch.Tensor) -> None:
        if _mapped_at(tensor.untyped_storage().data_ptr(), self._file):
            self.views += 1
        else:
            super().watch(tensor)


def _mapped_at(address: int, file: str) -> bool:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * LAYERS)))


def _filled(rank: int, world: int, file: str) -> list[torch.Tensor]:
    """Everything that is made, from the model on the meta device on."""
    check_before_first_use()  # its probes are not looked at
    with Memory(Path(file)) as live:
        with torch.device("meta"):
            model = _wide()
        assert live.peak == 0
        engine = rg.shard(model, 3, units=nn.Linear)
        shards = sum(unit.shard.nbytes for unit in engine.units)
        layer = max(unit.layout.page_bytes for unit in engine.units)
        assert shards + layer < world * shards, "or the test would show nothing"
        assert shards + WIDTH**2 * 4 <= live.peak <= shards + layer + FEW  # made a layer at a time
        live.restart_peak()
        assert shards <= live.peak <= shards + FEW
        assert live.views == 0
        rg.load_pretrained(model, file)
        assert live.views > 0, "or it was read in a way that this does not see"
        assert live.peak <= shards + FEW, live.peak - shards  # straight from the file into shards
    dist.barrier()
    return [param.full_tensor().detach().clone() for param in model.parameters()]


@WITH_OTHERS
def test_no_rank_holds_more_of_pretrained_weights_than_its_own(ranks: Ranks, world: int, tmp_path: Path) -> None:
    saved = _wide()
    file = tmp_path / "model.safetensors"
    save_file(saved.state_dict(), file)
    for found in ranks(world).run(_filled, str(file)):
        assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), found, strict=True))
