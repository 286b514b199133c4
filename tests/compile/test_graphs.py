"""How many graphs there are, when pages come and go around them, and what is said where there can be none."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import retrograde as rg
from benchmarks.compiled_memory import peak_bytes
from retrograde.ledger import Activity
from tests.compile.driver import Compiled, How, fresh
from tests.compile.models import BrokenMlp, LoopBlock, OneUnit, WhileBlock
from tests.harness import Ranks
from tests.patterns.models import FEATURES, Mlp, MlpBlock
from tests.small import BLOCKS, batch, build, loss_of
from tests.stages import EACH_STAGE, PAGE_STAGES

STEPS = 5


class Run:
    """Trains `Small` for a few steps, compiled or not, and looks at it."""

    def __init__(self, rank: int, stage: int, how: How | None, model: nn.Module | None = None) -> None:
        fresh()
        self.rank = rank
        self.model = build() if model is None else model
        self.engine = rg.shard(self.model, stage)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if how is not None:
            Compiled(how).apply(self.model, sharded=True)

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, number: int) -> torch.Tensor:
        return loss_of(self.model, batch(self.rank, number))


def frames() -> dict[str, int]:
    """Everything that grows when Dynamo looks at a frame or makes a graph."""
    return {**counters["frames"], **counters["stats"]}


def _graphs(rank: int, world: int, stage: int, how: How) -> list[dict[str, int]]:
    run = Run(rank, stage, how)
    seen = []
    for number in range(STEPS):
        run.step(number)
        seen.append(frames())
    dist.barrier()
    return seen


@pytest.mark.parametrize(("stage", "world"), ((1, 2), (2, 2), (3, 2), (3, 1)))
@pytest.mark.parametrize("how", How)
def test_graphs_are_made_once(ranks: Ranks, stage: int, world: int, how: How) -> None:
    for seen in ranks(world).run(_graphs, stage, how):
        assert seen[0]["unique_graphs"] == 3  # embedding, block, head: all blocks share theirs
        assert all(later == seen[0] for later in seen)


def _events(rank: int, world: int, stage: int, how: How | None) -> Any:
    run = Run(rank, stage, how)
    for number in range(STEPS):
        run.step(number)
    run.engine.ledger.clear()
    dist.barrier()
    most = peak_bytes(lambda: run.step(STEPS))
    dist.barrier()
    return [(e.kind, e.unit, e.bytes) for e in run.engine.ledger.entries], run.engine.ledger.peak, most


@PAGE_STAGES
def test_pages_and_reductions_are_those_of_an_eager_step(ranks: Ranks, stage: int) -> None:
    """The same gathers, each a unit ahead, the same drops and reductions, in the same order, and no more memory."""
    eager = ranks(2).run(_events, stage, None)
    for how in How:
        for got, want in zip(ranks(2).run(_events, stage, how), eager, strict=True):
            assert got[:2] == want[:2]
            assert got[2] <= 1.1 * want[2]
    if stage == 3:
        order = [(kind, unit) for kind, unit, _ in eager[0][0]]
        for index in range(BLOCKS - 1):
            ahead = order.index((Activity.GATHER, f"blocks.{index + 1}"))
            assert ahead < order.index((Activity.DROP, f"blocks.{index}"))


class Broken(Mlp):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))


def _pages_of_skipped_frames(rank: int, world: int, block: type[nn.Module], how: How) -> dict[str, Any]:
    torch.manual_seed(1)
    run = Run(rank, 3, how, Broken(block))
    sizes = sorted((unit.layout.page_bytes for unit in run.engine.units), reverse=True)
    held = []
    collect = run.engine.flow.collect

    def look(*args: Any) -> Any:
        result = collect(*args)
        held.append(sum(u.layout.page_bytes for u in run.engine.units if u.page.storage is not None))
        return result

    run.engine.flow.collect = look
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = run.model(x).square().mean()
        held.append(sum(u.layout.page_bytes for u in run.engine.units if u.page.storage is not None))
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    dist.barrier()
    skipped = counters["frames"]["total"] - counters["frames"]["ok"]
    graphs = counters["stats"]["unique_graphs"]
    return {"held": held, "two": sum(sizes[:2]), "ledger": run.engine.ledger.peak, "eager": (skipped, graphs)}


@pytest.mark.parametrize(("block", "how"), ((LoopBlock, How.MODEL), (WhileBlock, How.UNITS)))
def test_skipped_frames_release_unit_by_unit(ranks: Ranks, block: type[nn.Module], how: How) -> None:
    for seen in ranks(2).run(_pages_of_skipped_frames, block, how):
        skipped, graphs = seen["eager"]
        assert skipped > 0 and graphs == 2  # the blocks are eager; what comes before and after them is not
        assert len(seen["held"]) == 3 * 7 and max(seen["held"]) <= seen["two"]
        assert seen["ledger"] <= seen["two"]


class Off(MlpBlock):
    seen: ClassVar[list[bool]] = []

    @torch.compiler.disable
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.compiler.is_compiling())
        return super().forward(h)


def _unusual(rank: int, world: int, how: How) -> dict[str, Any]:
    Off.seen.clear()
    off = Run(rank, 3, how, Broken(Off))
    off.model(torch.ones(2, 6)).sum().backward()
    one = Run(rank, 3, how, OneUnit())
    one.model(torch.ones(2, 6)).sum().backward()
    one.model.last.extra = nn.Parameter(torch.ones(3))
    one.model(torch.ones(2, 6)).sum().backward()
    dist.barrier()
    return {"off": list(Off.seen), "graphs": counters["stats"]["unique_graphs"], "units": len(one.engine.units)}


@pytest.mark.parametrize("how", How)
def test_disabled_units_are_eager_and_new_parameters_are_found(ranks: Ranks, how: How) -> None:
    for seen in ranks(2).run(_unusual, how):
        assert seen["off"] == [False] * 5
        assert seen["graphs"] >= 1 and seen["units"] == 2


class Edits(MlpBlock):
    """Edits a weight in a way that only an error can be the answer to."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        (self.up.weight.data if self.through_data else self.up.weight).mul_(0.5)
        return super().forward(h)


def _edits(rank: int, world: int, how: How) -> list[str]:
    said = []
    for through_data in (True, False):
        run = Run(rank, 3, how, Broken(partial(Edits, through_data)))
        try:
            run.model(torch.ones(2, 6))
        except RuntimeError as error:
            said.append(str(error))
        dist.barrier()
    return said


@pytest.mark.parametrize("how", How)
def test_edits_that_cannot_be_compiled_raise(ranks: Ranks, how: How) -> None:
    for said in ranks(2).run(_edits, how):
        assert len(said) == 2
        assert all("blocks.0.up.weight" in each and "under torch.no_grad()" in each for each in said)


def _messages(rank: int, world: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    run = Run(rank, 3, None)
    try:
        torch.compile(run.model, backend="eager", fullgraph=True)(batch(rank))
    except torch._dynamo.exc.Unsupported as error:
        said["whole"] = str(error)
    rg.compile(run.model, backend="eager", fullgraph=True)
    run.step(0)
    said["graphs"] = counters["stats"]["unique_graphs"]

    broken = Run(rank, 3, None, Broken(WhileBlock))
    rg.compile(broken.model, backend="eager", fullgraph=True)
    try:
        broken.model(torch.ones(2, 6))
    except torch._dynamo.exc.Unsupported as error:
        said["unit"] = str(error)
    try:
        rg.compile(build())
    except rg.ShardingError as error:
        said["plain"] = str(error)

    fresh()
    read = torch.compile(lambda: broken.model.blocks[0].up.weight.sum() * 2, backend="eager")
    same = torch.equal(read(), broken.model.blocks[0].up.weight.sum() * 2)
    said["read"] = (same, " ".join([*counters["graph_break"], *counters["unimplemented"]]))
    dist.barrier()
    return said


class EditsFirst(MlpBlock):
    """Nothing is saved before the edits, which would publish them."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.mul(self.down.bias, 0.5, out=self.down.bias)
            self.up.weight.view(-1)[:] = self.up.weight.view(-1).clamp(-0.25, 0.25)
        return h + self.inner(self.norm(h))


def _edited_ahead_of_others(rank: int, world: int, stage: int, how: How) -> list[str]:
    """The last rank, which has the biases, is the first to edit. The others have not read what it edits."""
    fresh()
    torch.manual_seed(0)
    model = BrokenMlp(EditsFirst)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = rg.shard(model, stage)
    Compiled(how, "eager").apply(model, sharded=True)
    time.sleep(1.5 * (world - 1 - rank))
    model(torch.ones(2, FEATURES))
    with engine.full_params() as full:
        halved = [name for name in full if name.endswith("down.bias")]
        wrong = [name for name in halved if not torch.equal(full[name], before[name] * 0.5)]
    dist.barrier()
    return wrong if halved else ["nothing was looked at"]


@pytest.mark.parametrize("how", How)
@EACH_STAGE
def test_edits_wait_for_ranks_that_have_not_read(ranks: Ranks, stage: int, how: How) -> None:
    assert ranks(2).run(_edited_ahead_of_others, stage, how) == [[], []]


def test_what_cannot_be_compiled_says_so(ranks: Ranks) -> None:
    for said in ranks(2).run(_messages):
        assert "retrograde.compile(model, fullgraph=True)" in said["whole"]
        assert said["graphs"] == 3
        assert "models.py" in said["unit"] and "graph_break" in said["unit"]
        assert "call retrograde.shard() first" in said["plain"]
        same, reasons = said["read"]
        assert same and "read outside the forward of its unit" in reasons
