"""A failure on one rank is one error on all, soon, and the next step is clean."""

import copy
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from retrograde.pipeline import Action
from tests.endings import run_to_the_end
from tests.harness import RankPool
from tests.pipeline.cases import WIDTH, Fn, backward_order, lin, plain_step, rows

Ranks = Callable[[int], RankPool]
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half")


class Trap(torch.autograd.Function):
    """Raises in backward when it is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: "Trapped") -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.trap.count("backward")
        return grad, None


class Trapped(nn.Module):
    """Raises at the second forward, backward or weight gradient of a step, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.a = lin()
        self.where: str | None = None
        self.seen = 0

    def count(self, where: str) -> None:
        if where == self.where:
            self.seen += 1
            if self.seen == 2:
                raise ValueError(f"trap in {where}")

    def forward(self, x: Tensor) -> Tensor:
        self.count("forward")
        return torch.tanh(self.a(Trap.apply(x, self)))


def blocks() -> list[nn.Module]:
    return [Trapped() if n == 5 else Fn(lambda m, x: torch.tanh(m.a(x)), a=lin()) for n in range(8)]


def fail_then_recover(rank: int, world: int, schedule: str, where: str, zero: bool) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = blocks()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pp", "dp")) if zero else None
    pipe = rg.Pipeline(
        copy.deepcopy(model),
        schedule=schedule,
        microbatches=4,
        loss=F.mse_loss,
        mesh=mesh["pp"] if mesh else None,
        zero=rg.Zero(stage=2, mesh=mesh["dp"]) if mesh else None,
    )
    data = rows()
    pipe.step(*data.args, target=data.target)
    traps = [m for module in pipe.modules() for m in module.modules() if isinstance(m, Trapped)]
    if mesh is None or mesh["dp"].get_local_rank() == 0:
        for trap in traps:
            trap.where = where
    text = ""
    try:
        pipe.step(*data.args, target=data.target)
    except rg.PipelineError as error:
        text = str(error)
    for trap in traps:
        trap.where = None
    for p in pipe.parameters():
        p.grad = None
    pipe.step(*data.args, target=data.target)
    plain_step(model, data, F.mse_loss, backward_order(pipe.schedule))
    whole = dict(nn.ModuleList(model).named_parameters())
    grads = {n: pipe.engine.full_grad(p) if pipe.engine else p.grad for n, p in pipe.named_parameters()}
    return text, all(torch.equal(grad, whole[name].grad) for name, grad in grads.items())


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_raises_and_the_next_step_is_clean(ranks: Ranks, schedule: str, where: str) -> None:
    found = ranks(4).run(fail_then_recover, schedule, where, False, timeout=60)
    text = found[0][0]
    assert all(answer == (text, True) for answer in found)
    stage = {1: 2, 2: 5}[2 if "v" in schedule or "inter" in schedule else 1]
    split = "I" if schedule.startswith(("zb", "v")) else "B"
    kind = "F" if where == "forward" else split
    assert f"stage {stage}, microbatch " in text
    assert f", action {stage}{kind}" in text
    assert f"ValueError: trap in {where}" in text
    assert text.startswith("rank ")


def test_data_parallel_ranks_learn_of_it_too(ranks: Ranks) -> None:
    found = ranks(4).run(fail_then_recover, "zb-h1", "backward", True, timeout=60)
    assert len({text for text, _ in found}) == 1
    assert "ValueError: trap in backward" in found[0][0]
    assert all(clean for _, clean in found)


def watched(rank: int, world: int, schedule: str, at: str) -> tuple[str, str, list[str], bool]:
    """The callback on rank 1 raises in its second step, then at every action that follows."""
    torch.manual_seed(0)
    model = [lin() for _ in range(8)]
    pipe = rg.Pipeline(copy.deepcopy(model), schedule=schedule, microbatches=4, loss=F.mse_loss, timeout=10.0)
    data = rows()
    seen: list[str] = []

    def told(action: Action) -> None:
        seen.append(str(action))
        if at in seen:
            raise KeyError(f"told of {action}")

    if rank == 1:
        pipe.watch(told)
    text, cause = "nothing was raised", ""
    try:
        pipe.step(*data.args, target=data.target)
    except rg.PipelineError as error:
        text, cause = str(error), repr(error.__cause__)
    pipe.watch(None)
    for p in pipe.parameters():
        p.grad = None
    pipe.step(*data.args, target=data.target)
    plain_step(model, data, F.mse_loss, backward_order(pipe.schedule))
    whole = dict(nn.ModuleList(model).named_parameters())
    missed = [str(done.action) for done in pipe.trace] if rank == 1 else []
    clean = all(torch.equal(p.grad, whole[name].grad) for name, p in pipe.named_parameters())
    return text, cause, [each for each in missed if each not in seen], clean


@pytest.mark.parametrize(
    ("schedule", "at"), [("1f1b", "1F1"), ("1f1b", "1SEND_B3"), ("zb-h1", "1I0"), ("zb-v", "1RECV_F1")]
)
def test_a_callback_that_raises_fails_the_step(ranks: Ranks, schedule: str, at: str) -> None:
    for text, cause, missed, clean in ranks(2).run(watched, schedule, at, timeout=60):
        stage, microbatch = at[0], at[-1]
        place = f"rank 1, stage {stage}, microbatch {microbatch}, action {at}"
        assert text == f"{place}: the callback given to watch() raised KeyError: 'told of {at}'"
        assert cause in ("None", f"KeyError('told of {at}')")
        assert missed == [] and clean


def wrong_arguments(rank: int, world: int) -> list[str]:
    found = []
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "pp"))
    calls: list[Callable[[], Any]] = [
        lambda: rg.Pipeline(lin(), schedule="1f1b", microbatches=4),
        lambda: rg.Pipeline(blocks()[:1], schedule="1f1b", microbatches=4),
        lambda: rg.Pipeline(blocks(), schedule="nope", microbatches=4),
        lambda: rg.Pipeline(blocks(), schedule="1f1b", microbatches=4).step(torch.randn(3, WIDTH)),
        lambda: rg.Pipeline(blocks(), schedule="1f1b", microbatches=4, cut=rg.Cut(at=["9"])),
        lambda: rg.Pipeline(blocks(), schedule="1f1b", microbatches=4, cut=rg.Cut(costs=[1.0])),
        lambda: rg.Pipeline(blocks(), schedule="1f1b", microbatches=4, mesh=mesh),
    ]
    for call in calls:
        try:
            call()
            found.append("nothing was raised")
        except rg.RetrogradeError as error:
            found.append(str(error))
    return found


def test_wrong_arguments_are_named(ranks: Ranks) -> None:
    for found in ranks(2).run(wrong_arguments):
        assert found[0].startswith("model=Linear(in_features=8, out_features=8, bias=True) is not a chain of blocks")
        assert found[1].startswith("1 blocks cannot be cut into 2 stages")
        assert found[2].startswith("schedule='nope' is not known")
        assert found[3].startswith("rank 0: args: a tensor of shape [3, 8] cannot be cut into 4 microbatches")
        assert found[4].startswith("split point '9' is not a block")
        assert found[5].startswith("costs has 1 entries for 8 blocks")
        assert found[6] == "mesh has dimensions ('dp', 'pp'); give one of them, as mesh['pp']"


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(rg.PipelineError, match=r"no process group: call torch\.distributed\.init_process_group\(\)"):
        rg.Pipeline(blocks(), schedule="1f1b", microbatches=4)


# ---- a rank that does not come
def step_alone(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 makes no step: what rank 0 says, and after how many seconds."""
    pipe = rg.Pipeline([lin(), lin()], schedule="1f1b", microbatches=2, loss=F.mse_loss, timeout=1.0)
    x = torch.randn(4, WIDTH)
    text = ""
    began = time.monotonic()
    if rank == 0:
        try:
            pipe.step(x, target=x)
        except rg.PipelineError as error:
            text = str(error)
    took = time.monotonic() - began
    dist.barrier()
    return text, took


def test_a_rank_is_waited_for_as_long_as_the_time_out_says(ranks: Ranks) -> None:
    (text, took), _ = ranks(2).run(step_alone, timeout=60)
    assert re.search(
        r"rank 0 waits for the output gradient of stage 0, microbatch \d from pipeline rank 1: nothing came in 1 s",
        text,
    )
    assert 1.0 <= took < 30.0  # a message, and the agreement at the end; by default half an hour


def refuse_alone(rank: int, world: int, where: str) -> list[str]:
    """Rank 0's batch is wrong, or its block raises, and rank 1 does not come."""
    blocks = [Trapped(), lin()]
    pipe = rg.Pipeline(blocks, schedule="1f1b", microbatches=2, loss=F.mse_loss, timeout=1.0)
    x = torch.randn(1 if where == "batch" else 4, WIDTH)
    blocks[0].where = where
    said = []
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(rg.PipelineError) as raised:
            pipe.step(x, target=x)
        said.append(str(raised.value))
    dist.barrier()
    return said


@pytest.mark.parametrize(
    ("where", "why"), [("batch", "cannot be cut into 2 microbatches"), ("forward", "ValueError: trap in forward")]
)
def test_why_a_step_failed_is_said_though_others_do_not_come(ranks: Ranks, where: str, why: str) -> None:
    (first, second), _ = ranks(2).run(refuse_alone, where, timeout=60)
    for text in (first, second):
        assert why in text
        assert "; then: rank 0 waits for the output gradient of stage 0, microbatch 0 from pipeline rank 1" in text
    assert second.startswith("this pipeline has lost a rank in an earlier step, start the job again: ")


def interrupted(rank: int, world: int, at: str) -> list[str]:
    """Rank 1 breaks off its first step, as Ctrl-C does, and begins the next while rank 0 is still in the first."""
    pipe = rg.Pipeline([lin(), lin()], schedule="1f1b", microbatches=2, loss=F.mse_loss, timeout=2.0)
    x = torch.randn(4, WIDTH)
    said = []

    def stop(action: Action) -> None:
        if str(action) == at:
            raise KeyboardInterrupt

    if rank == 1:
        pipe.watch(stop)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(x, target=x)
        pipe.watch(None)
    for again in (lambda: pipe.step(x, target=x + 1), lambda: pipe.evaluate(x)):
        with pytest.raises(rg.PipelineError) as raised:
            again()
        said.append(str(raised.value))
    dist.barrier()
    return said


@pytest.mark.parametrize("at", ["1RECV_F0", "1B1"])
def test_no_step_follows_one_that_was_broken_off(ranks: Ranks, at: str) -> None:
    """Else the stages would take what is left of the first for the second."""
    waited, broken = ranks(2).run(interrupted, at, timeout=60)
    assert all("nothing came" in text or "rank 1" in text for text in waited), waited
    text = (
        "rank 1 has broken off an earlier step of this pipeline, which other ranks may still be in; start the job again"
    )
    assert broken == [text, text]


# ---- a rank that dies
DEAD = 3
BLAMED = re.compile(r"the connection to (rank \d+(?: \(rank \d+ of the job\))?) was lost")


def step_with_a_death(rank: int, world: int, schedule: str, kind: str, stage: int) -> None:
    """Two pipelines of two ranks, sharded over each other. Rank 3 ends in its second step, without a word.

    It is rank 1 both of its pipeline and of its replicas: every other number in the job would be the wrong one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    pipe = rg.Pipeline(
        [lin() for _ in range(4)],
        schedule=schedule,
        microbatches=4,
        loss=F.mse_loss,
        mesh=mesh["pp"],
        zero=rg.Zero(stage=stage, mesh=mesh["dp"]),
    )
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x)

    def end(action: Action) -> None:
        if str(action) == kind:
            os._exit(7)

    if rank == DEAD:
        pipe.watch(end)
    blamed = {f"rank 1 (rank {DEAD} of the job)"}
    with pytest.raises(rg.PipelineError) as raised:
        pipe.step(x, target=x)
    assert set(BLAMED.findall(str(raised.value))) == blamed, raised.value
    # Every survivor has come here before any of them ends: a rank that ended would be a second loss.
    for again in (lambda: pipe.step(x, target=x), lambda: pipe.evaluate(x)):
        with pytest.raises(rg.PipelineError, match="lost a rank in an earlier step, start the job again") as raised:
            again()
        assert set(BLAMED.findall(str(raised.value))) == blamed, raised.value
    time.sleep(2)
    os._exit(0)


DEATHS = [("zb-h1", "1F1", 3), ("zb-h1", "1I0", 2), ("zb-h1", "1W2", 1), ("zb-v", "2I1", 3), ("1f1b", "1B3", 2)]


@pytest.mark.parametrize(("schedule", "kind", "stage"), DEATHS)
def test_a_rank_that_dies_is_named_on_all_ranks(schedule: str, kind: str, stage: int) -> None:
    endings = run_to_the_end(step_with_a_death, 4, schedule, kind, stage, timeout=60)
    assert [ending.code for ending in endings] == [0, 0, 0, 7], [ending.said for ending in endings]
